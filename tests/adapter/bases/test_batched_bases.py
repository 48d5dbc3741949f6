"""Bases of layers of one shape, built together as on a GPU, against those that are built one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adapted import BATCHES, adapted, cores_of
from frozencore import calibrate
from frozencore.adapter import calibrate as batched_bases
from frozencore.maths.linalg import principal_cosines


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers are built together on this device too; how many each time."""
    sizes: list[int] = []
    build = batched_bases.build_batch

    def counted(constructor: str, layers: Any, options: Any) -> Any:
        if len(layers) > 1:
            sizes.append(len(layers))
        return build(constructor, layers, options)

    monkeypatch.setattr(batched_bases, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(batched_bases, "build_batch", counted)
    return sizes


def bases(constructor: str, **options: Any) -> dict[str, tuple[Tensor, Tensor, int]]:
    calibration_options = options.pop("calibrate", {})
    model = adapted(constructor, calibrated=False, dtype=torch.float64, **options)
    calibration = calibrate(model, BATCHES, progress=False, **calibration_options)
    return {
        layer.name: (*layer.factors("default")[:2], calibration.layers[layer.name].effective_rank)
        for layer in cores_of(model)
    }


@pytest.mark.parametrize("constructor", ["fcca", "rawgrad"])
def test_layers_of_one_shape_get_the_bases_that_each_would_get_alone(constructor: str, batches: list[int]) -> None:
    found = bases(constructor)
    assert sorted(batches) == [4, 4]  # q and o of two blocks, k and v
    batches.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_bases, "_is_on_gpu", lambda _: False)
        alone = bases(constructor)
    assert batches == []
    for name, (P, Q, rank) in found.items():
        assert rank == alone[name][2]
        for X, Y in ((P, alone[name][0]), (Q, alone[name][1])):
            assert float(principal_cosines(X, Y).min()) > 1 - 1e-6


def test_ranks_of_their_own_and_budgets_are_not_mixed(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bases("fcca", rank_pattern={r"0\.self_attn\.q_proj": 2})
    assert sorted(batches) == [3, 4]
    batches.clear()
    bases("fcca", calibrate={"memory_budget": "1GiB"})
    bases("eva")
    assert batches == []
    monkeypatch.setattr(batched_bases, "BATCH_BYTES", 2 * 32 * 32 * 8)
    bases("fcca")
    assert sorted(batches) == [2, 2, 4]
