"""The captures that calibration reports for its bases, measured on its own moments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import references as ref
from adapted import BATCHES, EXAMPLES, adapted, cores_of
from frozencore import CONSTRUCTORS, calibrate
from frozencore.calibration.collect import collect_moments
from frozencore.maths.moments import MOMENT_NAMES, LayerMoments
from references import Array, numpy_of
from tiny import tiny_qwen2

NAMES = [layer.name for layer in cores_of(adapted("random"))]


@pytest.fixture(scope="module")
def everything() -> dict[str, LayerMoments]:
    return collect_moments(tiny_qwen2(), BATCHES, NAMES, needs=frozenset(MOMENT_NAMES))


@pytest.fixture(scope="module")
def metrics() -> dict[str, tuple[Array, Array, Array]]:
    """G, A and D of every layer, token by token in float64."""
    sums = ref.reference_moments(tiny_qwen2(), [(list(e.ids), e.num_prompt) for e in EXAMPLES], NAMES)
    found = {}
    for name, s in sums.items():
        A, D = (ref.damped_matrix(np.diag(M / s.num_tokens), 1e-3) for M in (s.input_outer, s.error_outer))
        found[name] = (s.cross / s.num_tokens, A, D)
    return found


@pytest.mark.parametrize("constructor", ["fcca", "rawgrad", "signgrad", "filora", "eva"])
def test_with_all_moments_at_hand_every_constructor_says_what_its_bases_capture(
    constructor: str, everything: dict[str, LayerMoments], metrics: dict[str, tuple[Array, Array, Array]]
) -> None:
    model = adapted(constructor, calibrated=False)
    calibration = calibrate(model, moments=everything, progress=False)
    for layer in cores_of(model):
        found = calibration.layers[layer.name].capture
        assert found is not None
        G, A, D = metrics[layer.name]
        P, Q, _ = (numpy_of(factor) for factor in layer.factors("default"))
        assert pytest.approx(ref.captured(G, A, D, P, Q), rel=1e-3) == found.J
        assert found.gradient == pytest.approx(np.linalg.norm(P.T @ G @ Q), rel=1e-3)
        assert found.gradient_total == pytest.approx(np.linalg.norm(G), rel=1e-4)


def test_of_all_constructors_fcca_captures_most(everything: dict[str, LayerMoments]) -> None:
    total = {}
    for constructor in ("fcca", "rawgrad", "signgrad", "filora", "eva"):
        found = calibrate(adapted(constructor, calibrated=False), moments=everything, progress=False)
        total[constructor] = sum(layer.capture.J for layer in found.layers.values() if layer.capture)
    assert max(total, key=total.__getitem__) == "fcca"


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_a_pass_that_sums_g_measures_the_captures_too(constructor: str) -> None:
    calibration = calibrate(adapted(constructor, coordinates="qr", calibrated=False), BATCHES, progress=False)
    measured = constructor in ("fcca", "rawgrad", "signgrad")
    assert {layer.capture is not None for layer in calibration.layers.values()} == {measured}


def test_a_moment_that_the_constructor_does_not_read_and_nobody_can_fails_no_calibration(
    everything: dict[str, LayerMoments],
) -> None:
    broken = {name: replace(m, cross=torch.full_like(m.cross, math.nan)) for name, m in everything.items()}  # type: ignore[arg-type]
    calibration = calibrate(adapted("eva", calibrated=False), moments=broken, progress=False)
    assert {layer.capture for layer in calibration.layers.values()} == {None}
