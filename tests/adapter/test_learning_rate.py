"""The proposed learning rate of cores, against gradients of a float64 copy, one example and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import references as ref
from frozencore import calibrate
from frozencore.adapter import learning_rate
from frozencore.adapter.learning_rate import evenly_spaced
from references import numpy_of
from tiny import BATCHES, EXAMPLES, adapted, batches_of, cores_of, tiny_qwen2


@pytest.mark.parametrize(("longest", "lower"), [(0.8, 0.9), (8.0, 1.0)])
@pytest.mark.parametrize("constructor", ["fcca", "rawgrad", "eva"])
def test_the_rate_is_a_step_in_the_fisher_metric_halved_while_it_is_too_long(
    constructor: str, longest: float, lower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning_rate, "FISHER_STEP", longest)
    monkeypatch.setattr(learning_rate, "LOWER", lower)
    model = adapted(constructor, dtype=torch.float64, calibrated=False, alpha=6.0)
    found = calibrate(model, BATCHES, progress=False)
    layers, squares, mean = {layer.name: layer for layer in cores_of(model)}, [], dict[str, Any]()
    for example in EXAMPLES:
        sums = ref.reference_moments(tiny_qwen2(), [(list(example.ids), example.num_prompt)], list(layers))
        gradients = {}
        for name, layer in layers.items():
            P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
            gradients[name] = 2.0 * P.T @ sums[name].cross @ Q  # s = alpha / r
            mean[name] = mean.get(name, 0) + gradients[name]
        squares.append(sum(np.square(gradient).sum() for gradient in gradients.values()))

    def loss_after(rate: float) -> float:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.core("default").copy_(torch.from_numpy(-rate * np.sign(mean[name])))
            return sum(float(loss_of_example(model, example)) for example in EXAMPLES)

    rate, halvings = longest / np.sqrt(np.mean(squares)), 0
    while loss_after(rate / 2) < lower * loss_after(rate):
        rate, halvings = rate / 2, halvings + 1
    assert halvings > 0 or longest < 1
    assert found.learning_rate == pytest.approx(rate, rel=1e-6)


def loss_of_example(model: torch.nn.Module, example: Any) -> torch.Tensor:
    ids = torch.tensor([list(example.ids)])
    logits = model(input_ids=ids).logits[0, example.num_prompt - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, ids[0, example.num_prompt :])


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


def test_batches_stay_whole_where_rows_belong_together() -> None:
    """Patches of images have rows of their own, and a loss of pairs compares the rows of a batch."""
    patches: list[Any] = [{"input_ids": torch.zeros(2, 3), "pixel_values": torch.zeros(7, i + 1)} for i in range(8)]
    assert [one["pixel_values"].shape[1] for one in evenly_spaced(patches, 4)] == [1, 5]
    pairs: list[Any] = [{"input_ids": torch.full((4, 3), i)} for i in range(8)]
    assert [len(one["input_ids"]) for one in evenly_spaced(pairs, 16, whole=True)] == [4] * 4
