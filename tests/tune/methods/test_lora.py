"""LoRA, DoRA and PiSSA: an untouched start, counts by formula, and an adapter that reloads on the original base."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore.errors import ConfigError
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import ATTENTION, VOCABULARY, draw_examples, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
NAMES = ("lora", "dora", "pissa")
TOKENS = torch.arange(3, 15).reshape(2, 6) % VOCABULARY


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def adapted(name: str, model: nn.Module | None = None) -> PeftModel:
    return METHODS[name].add(model or tiny_qwen2(), AdapterOptions(rank=4, targets=ATTENTION, seed=3, core={}))


@pytest.mark.parametrize("name", NAMES)
def test_untrained_it_is_the_base_model(name: str) -> None:
    torch.testing.assert_close(logits(adapted(name)), logits(tiny_qwen2()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_trained_it_reloads_on_the_original_base(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    METHODS[name].keep_start(model, tmp_path / "start")
    train(model, ROWS, Recipe(learning_rate=3e-2, warmup=0.03, epochs=4), pad_id=0)
    trained = logits(model)
    METHODS[name].save(model, tmp_path / "adapter", tmp_path / "start")
    torch.testing.assert_close(logits(model), trained, atol=0, rtol=0)

    base = tiny_qwen2()
    original = copy.deepcopy(base.state_dict())
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(reloaded), trained, atol=1e-5, rtol=1e-4)
    assert (trained - logits(tiny_qwen2())).abs().max() > 1e-2
    unloaded = reloaded.unload().state_dict()
    assert all(torch.equal(unloaded[key], value) for key, value in original.items())


def test_the_same_seed_gives_the_same_factors_and_leaves_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    first, again = adapted("lora").state_dict(), adapted("lora").state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_trainable_values_on_the_qwen_3b_shapes_are_the_papers() -> None:
    config = Qwen2Config(
        vocab_size=16, hidden_size=2048, intermediate_size=16, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2,
    )  # fmt: skip
    for name, expected in (("lora", 7_372_800), ("dora", 7_538_688)):
        with torch.device("meta"):
            options = AdapterOptions(rank=16, targets=ATTENTION, seed=0, core={})
            model = METHODS[name].add(Qwen2ForCausalLM(config), options)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected


def test_wrong_ranks_and_targets_are_one_line() -> None:
    for wrong, reason in (
        ({"rank": 0}, "at least 1, got 0"),
        ({"targets": ("nowhere",)}, "targets .*nowhere.* cannot carry LoRA"),
    ):
        options = AdapterOptions(**({"rank": 4, "targets": ATTENTION, "seed": 0, "core": {}} | wrong))
        with pytest.raises(ConfigError, match=reason):
            METHODS["lora"].add(tiny_qwen2(), options)
