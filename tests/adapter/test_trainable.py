"""Trained parameters beside the cores are refused before the first step, in one line that names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from adapted import adapted
from frozencore import FrozenCoreConfig
from frozencore.adapter.layer import require_own_parameters
from frozencore.errors import ConfigError
from frozencore.tune.cost import values_at_once
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import draw_examples, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(4, seed=5))]
RECIPE = Recipe(learning_rate=5e-3, warmup=0.03, batch_size=2, accumulation=1)


def unfreeze_a_weight(model: PeftModel) -> None:
    model.model.model.layers[1].mlp.up_proj.weight.requires_grad_()


def unfreeze_a_base_weight(model: PeftModel) -> None:
    model.model.model.layers[0].self_attn.q_proj.get_base_layer().weight.requires_grad_()


def unfreeze_another_adapter(model: PeftModel) -> None:
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random"))
    model.model.model.layers[0].self_attn.k_proj.frozencore_R["other"].weight.requires_grad_()


def freeze_a_core(model: PeftModel) -> None:
    model.model.model.layers[1].self_attn.v_proj.frozencore_R["default"].weight.requires_grad_(False)


FAULTS: dict[Callable[[PeftModel], None], str] = {
    unfreeze_a_weight: r"cores, 72 values, but '\S*1.mlp.up_proj.weight' trains as well \(1 parameters of 1,536 values",
    unfreeze_a_base_weight: r"but '\S*layers.0.self_attn.q_proj.base_layer.weight' trains as well",
    unfreeze_another_adapter: r"but '\S*layers.0.self_attn.k_proj.frozencore_R.other.weight' trains as well",
    freeze_a_core: r"'\S*layers.1.self_attn.v_proj.frozencore_R.default.weight' is frozen \(1 of 8\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_count_that_is_not_the_sum_of_r_squared_is_refused_before_a_step(fault: Callable[[PeftModel], None]) -> None:
    model = adapted("random")
    fault(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=FAULTS[fault]) as caught:
        train(model, ROWS, RECIPE, pad_id=0)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}])
def test_what_the_configuration_names_may_train(options: dict) -> None:
    model = adapted("random", model=tiny_qwen2(tie_word_embeddings=False), **options)
    own = require_own_parameters(model)
    assert sum(parameter.numel() for parameter in own) == values_at_once(model)
    assert (len(own) > 8) == bool(options)
    assert train(model, ROWS, RECIPE, pad_id=0).num_steps == 2


def test_a_second_adapter_trains_alone_once_it_is_the_active_one() -> None:
    model = adapted("random")
    model.add_adapter("other", FrozenCoreConfig(r=2, constructor="random"))
    model.set_adapter("other")
    assert sum(parameter.numel() for parameter in require_own_parameters(model)) == 8 * 2**2


@pytest.mark.parametrize("make", [tiny_qwen2, lambda: get_peft_model(tiny_qwen2(), LoraConfig(r=2))])
def test_models_without_frozen_cores_are_left_to_train_what_they_like(make: Callable[[], nn.Module]) -> None:
    assert require_own_parameters(make()) == []
