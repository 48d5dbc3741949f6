"""GaLore and APOLLO: whole weights train, the state has a rank, and what is saved loads without their packages."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn

from frozencore.errors import ConfigError
from frozencore.tune.evaluation.adapters import BaseWithAdapter
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.config import make_config
from frozencore.tune.run.costs import values_at_once
from frozencore.tune.scoring.forward import take_off
from frozencore.tune.training.recipe import Recipe, optimiser_arguments
from frozencore.tune.training.train import train
from resumed import require_bit_equal_resume
from tiny import ATTENTION, VOCABULARY, draw_examples, tiny_llama, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
NAMES = ("galore", "apollo")
EVERY = pytest.mark.parametrize("name", NAMES)
OPTIONS = AdapterOptions(rank=3, targets=ATTENTION, seed=3, core={})
TOKENS = torch.arange(3, 15).reshape(2, 6) % VOCABULARY


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def adapted(name: str) -> PeftModel:
    return METHODS[name].add(tiny_llama(), OPTIONS)


def recipe_for(name: str) -> Recipe:
    pytest.importorskip(METHODS[name].package)  # type: ignore[attr-defined]
    optimiser = METHODS[name].optimiser
    assert optimiser is not None
    return Recipe(
        learning_rate=3e-2, warmup=0.03, epochs=4, batch_size=2, accumulation=1, refresh=4, optimiser=optimiser,
        optimiser_rank=OPTIONS.rank,
    )  # fmt: skip


@EVERY
def test_untrained_it_is_the_base_model_and_trains_the_weights_of_the_targets(name: str) -> None:
    model = adapted(name)
    assert torch.equal(logits(model), logits(tiny_llama()))
    weights = [value for key, value in tiny_llama().named_parameters() if any(target in key for target in ATTENTION)]
    assert values_at_once(model) == sum(weight.numel() for weight in weights)


@EVERY
def test_trained_it_reloads_on_the_original_base_which_comes_out_as_it_went_in(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    train(model, ROWS, recipe_for(name), pad_id=0)
    trained = logits(model)
    METHODS[name].save(model, tmp_path / "adapter", tmp_path / "start")
    base = tiny_llama()
    original = copy.deepcopy(base.state_dict())
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), trained)
    bare = take_off(model)
    assert (trained - logits(bare)).abs().max() > 1e-2
    assert bare.state_dict().keys() == original.keys()
    assert all(torch.equal(bare.state_dict()[key], value) for key, value in original.items())


@EVERY
def test_it_is_evaluated_and_leaves_the_base_to_the_next_adapter(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    METHODS[name].save(model, tmp_path / "adapter", tmp_path / "start")
    base = BaseWithAdapter(tiny_llama())
    worn = logits(base.with_adapter(tmp_path / "adapter"))
    assert (worn - logits(tiny_llama())).abs().max() > 1e-2
    torch.testing.assert_close(worn, logits(model))
    assert torch.equal(logits(base.without_adapter()), logits(tiny_llama()))


@EVERY
def test_a_resumed_training_is_bit_equal_to_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    require_bit_equal_resume(lambda: adapted(name), ROWS, recipe_for(name), tmp_path)


def test_rounds_decide_how_often_directions_are_chosen_and_biases_have_none() -> None:
    model = METHODS["galore"].add(tiny_qwen2(), OPTIONS)  # whose projections have biases
    told = optimiser_arguments(model, "galore_adamw", 3, num_steps=50, rounds=16)
    assert "rank=3, update_proj_gap=4," in told["optim_args"]
    assert len(told["optim_target_modules"]) == 2 * len(ATTENTION)
    assert make_config(model="pocket", task="pocket-math", method="galore", refresh=16).refresh == 16


@EVERY
def test_a_package_that_is_not_there_and_layers_that_are_not_are_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore.tune.methods.whole_weights.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"is in {name}_torch, which is not installed: pip install .*peers"):
        METHODS[name].require()
    with pytest.raises(ConfigError, match="cannot carry"):
        METHODS[name].add(tiny_llama(), replace(OPTIONS, targets=("nowhere",)))
