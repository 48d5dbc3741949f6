"""The state held while training, measured from live tensors, against what each method must hold by its own formula."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn

from adapted import adapted, cores_of
from frozencore import Refresh
from frozencore.calibration.running_sketch import sketch_bytes
from frozencore.errors import TrainingError
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.costs import model_bytes, training_state_bytes, values_at_once
from frozencore.tune.training.callbacks import total_bytes
from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import ATTENTION, draw_examples, tiny_llama, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
RECIPE = Recipe(learning_rate=1e-2, warmup=0.1, epochs=3, batch_size=2, accumulation=1)
OPTIONS = AdapterOptions(rank=3, targets=ATTENTION, seed=3, core={})
ROUNDS = 3


def past_bytes(model: PeftModel, earlier: int) -> int:
    """The factors of so many rounds of rank r, all the cores as one matrix, and the copies that stand in for them."""
    found = 0
    for layer in cores_of(model):
        (m, n), r = layer.shape, len(layer.core("default"))
        k = (earlier + 1) * r
        found += 4 * earlier * r * (m + n) + 4 * k * k
        found += 4 * (m * n + r * (m + n)) if k * (m + n) >= m * n / 4 else 0
    return found


@pytest.mark.parametrize("name", ["lora", "dora", "full", "fcca"])
def test_what_adamw_holds_is_twelve_bytes_a_value(name: str) -> None:
    model = adapted() if name == "fcca" else METHODS[name].add(tiny_qwen2(), OPTIONS)
    report = train(model, ROWS, RECIPE, pad_id=0)
    assert report.state_held_bytes == 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.earlier_values == 0


def test_whole_models_are_counted_in_the_same_way_and_tied_weights_once() -> None:
    model = tiny_qwen2()
    tied = {id(parameter): parameter for parameter in model.parameters()}
    report = train(model, ROWS, RECIPE, pad_id=0)
    assert report.state_held_bytes == 12 * sum(parameter.numel() for parameter in tied.values())


def test_rounds_hold_exact_sums_and_what_earlier_rounds_left() -> None:
    model = adapted()
    report = train(model, ROWS, replace(RECIPE, refresh=ROUNDS), pad_id=0)
    sums = sum(4 * (m * n + m + n) for m, n in (layer.shape for layer in cores_of(model)))
    last_that_sums, last = sums + past_bytes(model, ROUNDS - 2), past_bytes(model, ROUNDS - 1)
    assert report.state_held_bytes == training_state_bytes(values_at_once(model)) + max(last_that_sums, last)
    beside = report.state_held_bytes - training_state_bytes(values_at_once(model))
    assert beside <= Refresh(adapted(), ROUNDS).foreseen_bytes(ROUNDS) <= 1.05 * beside
    assert report.earlier_values == 2 * values_at_once(model) == 2 * 9 * len(cores_of(model))


def test_lora_in_rounds_holds_its_earlier_factors_and_a_copy_of_each_weight() -> None:
    model = METHODS["lora"].add(tiny_llama(), OPTIONS)
    shapes = [tuple(p.shape) for name, p in tiny_llama().named_parameters() if any(t in name for t in ATTENTION)]
    report = train(model, ROWS, replace(RECIPE, refresh=ROUNDS), pad_id=0)
    of_a_round = sum(OPTIONS.rank * (m + n) for m, n in shapes)
    copies = sum(4 * m * n for m, n in shapes)
    assert (report.values_at_once, report.earlier_values) == (of_a_round, (ROUNDS - 1) * of_a_round)
    assert report.state_held_bytes == 12 * of_a_round + 4 * (ROUNDS - 1) * of_a_round + copies


@pytest.mark.parametrize("budget", [40_000, 70_000])
def test_sketches_take_the_place_of_sums(budget: int) -> None:
    """The wide ones are more than what the first round leaves, the narrow ones less."""
    model = adapted()
    widths = Refresh(adapted(), 2, memory_budget=budget).widths
    assert widths is not None
    report = train(model, ROWS, replace(RECIPE, refresh=2, refresh_memory=budget), pad_id=0)
    sketches = sum(sketch_bytes(layer.shape, widths[layer.name])[0] for layer in cores_of(model))
    assert (sketches > past_bytes(model, 1)) == (budget > 50_000)
    beside = report.state_held_bytes - training_state_bytes(values_at_once(model))
    assert beside == max(sketches, past_bytes(model, 1))
    assert beside == Refresh(adapted(), 2, memory_budget=budget).foreseen_bytes(2)


def test_a_resumed_training_has_held_what_the_whole_one_held(tmp_path: Path) -> None:
    """Stopped in the last round, whose own state is smaller than what was held before it."""
    recipe = replace(RECIPE, refresh=2)
    whole = train(adapted(), ROWS, recipe, pad_id=0)

    def stop(stage: str, done: int, total: int | None, note: str = "") -> None:
        if done == 10:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"pad_id": 0, "checkpoint_dir": tmp_path, "checkpoint_steps": 1}
    with pytest.raises((KeyboardInterrupt, TrainingError)):
        train(adapted(), ROWS, recipe, progress=stop, **options)
    resumed = train(adapted(), ROWS, recipe, resume=True, **options)
    assert resumed.resumed_from is not None
    assert int(resumed.resumed_from.name.removeprefix("checkpoint-")) > 6
    assert resumed.state_held_bytes == whole.state_held_bytes


def test_a_tenant_in_company_holds_what_it_would_alone() -> None:
    model = adapted()
    trained = train_many(model, {"anna": Tenant(ROWS, RECIPE), "ben": Tenant(ROWS[:3], RECIPE)}, pad_id=0)
    alone = train(adapted(), ROWS, RECIPE, pad_id=0)
    assert {one.report.state_held_bytes for one in trained.values()} == {alone.state_held_bytes}


def test_tensors_that_are_one_count_once_and_views_as_large_as_they_are() -> None:
    X = torch.zeros(4, 6)
    assert total_bytes([X, X, X.view(24)]) == X.nbytes
    assert total_bytes([X[:, :2], torch.tensor(3.0), torch.zeros(0, 5)]) == 32


def test_the_models_size_is_that_of_its_own_weights_whatever_is_on_it() -> None:
    plain = tiny_llama()
    expected = sum(parameter.nbytes for parameter in plain.parameters())
    assert model_bytes(plain) == expected
    for name in ("lora", "full"):
        assert model_bytes(METHODS[name].add(copy.deepcopy(plain), OPTIONS)) == expected
    half: nn.Module = copy.deepcopy(plain).to(torch.bfloat16)
    assert model_bytes(half) == expected // 2
