"""The state held while training, measured from live tensors, against what each method must hold by its own formula."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from adapted import adapted
from frozencore.tune.cost import model_bytes
from frozencore.tune.many.tenant import Tenant
from frozencore.tune.many.train import train_many
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.callbacks import total_bytes
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from tiny import ATTENTION, draw_examples, tiny_llama, tiny_qwen2

ROWS = [TokenRow(f"row-{i}", list(e.ids), e.num_prompt) for i, e in enumerate(draw_examples(8, seed=5))]
RECIPE = Recipe(learning_rate=1e-2, warmup=0.1, epochs=3, batch_size=2, accumulation=1)
OPTIONS = AdapterOptions(rank=3, targets=ATTENTION, seed=3, core={})


@pytest.mark.parametrize("name", ["lora", "dora", "full", "fcca"])
def test_what_adamw_holds_is_twelve_bytes_a_value(name: str) -> None:
    model = adapted() if name == "fcca" else METHODS[name].add(tiny_qwen2(), OPTIONS)
    report = train(model, ROWS, RECIPE, pad_id=0)
    assert report.state_held_bytes == 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_whole_models_are_counted_in_the_same_way_and_tied_weights_once() -> None:
    model = tiny_qwen2()
    tied = {id(parameter): parameter for parameter in model.parameters()}
    report = train(model, ROWS, RECIPE, pad_id=0)
    assert report.state_held_bytes == 12 * sum(parameter.numel() for parameter in tied.values())


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
