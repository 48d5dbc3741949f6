"""Counts that the paper gives for Qwen2.5-3B, from its shapes alone (meta device)."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore import CONSTRUCTORS, FrozenCoreConfig
from frozencore.adapter.loaded_adapter import frozen_core_layers

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def qwen25_3b() -> nn.Module:
    config = Qwen2Config(
        hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
        intermediate_size=11008, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_the_shapes_are_those_of_a_three_billion_parameter_model() -> None:
    assert sum(parameter.numel() for parameter in qwen25_3b().parameters()) == 3_085_938_688


@pytest.mark.parametrize(
    ("constructor", "targets"),
    [("fcca", None), ("milora", ATTENTION)]
    + [pytest.param(*words, marks=pytest.mark.slow) for words in (("fcca", ATTENTION), ("milora", None))],
)
def test_frozen_cores_train_36864_values_on_144_targets(constructor: str, targets: list[str] | None) -> None:
    model = get_peft_model(qwen25_3b(), FrozenCoreConfig(r=16, target_modules=targets, constructor=constructor))
    assert len(frozen_core_layers(model, "default")) == 144
    assert trainable(model) == 36_864
    assert set(CONSTRUCTORS) >= {constructor}


def test_frozen_bases_take_r_times_m_plus_n_values_per_target() -> None:
    """Section 3.4: r(m+n) stored values per matrix; as many as LoRA trains."""
    model = get_peft_model(qwen25_3b(), FrozenCoreConfig(r=16))
    stored = sum(
        factor.numel()
        for layer in frozen_core_layers(model, "default").values()
        for factor in layer.factors("default")[:2]
    )
    assert stored == 7_372_800
