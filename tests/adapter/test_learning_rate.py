"""The proposed learning rate of cores, against gradients of a float64 copy, one example and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import references as ref
from frozencore import calibrate
from frozencore.adapter.learning_rate import FISHER_STEP, evenly_spaced
from references import numpy_of
from tiny import BATCHES, EXAMPLES, adapted, batches_of, cores_of, tiny_qwen2


@pytest.mark.parametrize("constructor", ["fcca", "rawgrad", "eva"])
def test_the_rate_is_a_step_of_one_size_in_the_fisher_metric(constructor: str) -> None:
    model = adapted(constructor, dtype=torch.float64, calibrated=False, alpha=6.0)
    found = calibrate(model, BATCHES, progress=False)
    layers, squares = {layer.name: layer for layer in cores_of(model)}, []
    for example in EXAMPLES:
        sums = ref.reference_moments(tiny_qwen2(), [(list(example.ids), example.num_prompt)], list(layers))
        gradients = []
        for name, layer in layers.items():
            P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
            gradients.append(2.0 * P.T @ sums[name].cross @ Q)  # s = alpha / r
        squares.append(sum(np.square(gradient).sum() for gradient in gradients))
    assert found.learning_rate == pytest.approx(FISHER_STEP / np.sqrt(np.mean(squares)), rel=1e-6)


def test_a_rate_does_not_depend_on_the_size_of_batches() -> None:
    rates = [calibrate(adapted(calibrated=False), batches_of(EXAMPLES, size), progress=False).learning_rate
             for size in (1, 3, 8)]  # fmt: skip
    assert rates[0] is not None
    assert rates == pytest.approx([rates[0]] * 3, rel=1e-4)


def test_a_finer_scale_takes_a_larger_rate() -> None:
    """The rate follows 1 / s, so s is of no consequence for training."""
    rates = [calibrate(adapted(calibrated=False, alpha=alpha), BATCHES, progress=False).learning_rate
             for alpha in (3.0, 0.3)]  # fmt: skip
    assert rates[1] == pytest.approx(10 * rates[0], rel=1e-5)


def test_the_model_is_as_before() -> None:
    model = adapted(calibrated=False)
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    calibrate(model, BATCHES, progress=False)
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    assert not any(torch.count_nonzero(layer.core("default")) for layer in cores_of(model))


def test_the_examples_are_spread_over_all_batches() -> None:
    batches: list[Any] = [{"input_ids": torch.arange(8).view(8, 1) + 8 * i} for i in range(4)]
    assert [int(one["input_ids"]) for one in evenly_spaced(batches, 4)] == [0, 8, 16, 24]
    assert [int(one["input_ids"]) for one in evenly_spaced(batches, 64)] == list(range(32))


def test_batches_that_cannot_be_split_give_no_rate() -> None:
    """Patches of images have rows of their own; only the model knows whose they are."""
    batches: list[Any] = [{"input_ids": torch.zeros(2, 3), "pixel_values": torch.zeros(7, 5)}]
    assert not list(evenly_spaced(batches, 4))
