"""The capture of a basis against token-by-token float64 references."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import references as ref
from frozencore import random_basis
from frozencore.maths import capture as capture_module
from frozencore.maths.basis import Coordinates
from frozencore.maths.capture import Capture, measure_capture
from frozencore.maths.moments import max_over_median
from references import Array, numpy_of
from tiny import drawn_layer

RANK = 3


def reference(layer, basis) -> tuple[Array, Array, Array, Array, Array]:  # type: ignore[no-untyped-def]
    """G, T, P, Q and C of a layer in float64."""
    e = layer.reference()
    A, D = (ref.damped_matrix(np.diag(M), 1e-3) for M in (e.A, e.D))
    P, Q = numpy_of(basis.P).astype(float), numpy_of(basis.Q).astype(float)
    C = ref.power(P.T @ D @ P, -0.5) @ P.T @ e.G @ Q @ ref.power(Q.T @ A @ Q, -0.5)
    return e.G, ref.whitened(e.G, A, D), P, Q, C


SIZES = st.integers(3, 9)


@given(SIZES, SIZES, st.integers(1, 3), st.integers(0, 1000), st.sampled_from(sorted(get_args(Coordinates))))
def test_every_number_is_its_definition(m: int, n: int, rank: int, seed: int, coordinates: str) -> None:
    layer = drawn_layer(m, n, num_tokens=40, seed=seed)
    basis = random_basis((m, n), rank, coordinates=coordinates, seed=seed)
    found = measure_capture(layer.moments(), basis)
    G, T, P, Q, C = reference(layer, basis)
    spans = [np.linalg.qr(X)[0] for X in (P, Q)]
    assert found.gradient == pytest.approx(np.linalg.norm(spans[0].T @ G @ spans[1]), rel=1e-5)
    assert found.gradient_total == pytest.approx(np.linalg.norm(G), rel=1e-9)
    assert found.energy == pytest.approx(np.linalg.norm(T) ** 2, rel=1e-9)
    assert found.values == pytest.approx(list(np.linalg.svd(C)[1]), rel=1e-4, abs=1e-7)
    assert pytest.approx(np.linalg.norm(C) ** 2, rel=1e-4) == found.J
    assert 0 <= found.J <= found.energy * (1 + 1e-9)
    assert 1 - 1e-9 <= found.participation <= rank + 1e-9
    moments = layer.moments()
    assert (found.input_spread, found.error_spread) == (max_over_median(moments.a), max_over_median(moments.d))


def test_a_gradient_of_few_directions_has_as_many() -> None:
    moments = drawn_layer(12, 10).moments()
    low = replace(moments, cross=torch.outer(torch.arange(1.0, 13), torch.ones(10)).double())
    found = measure_capture(low, random_basis((12, 10), RANK, seed=1))
    assert found.effective_rank == 1
    assert found.participation == pytest.approx(1)


def test_the_scale_of_the_loss_changes_the_gradient_alone_also_where_its_squares_are_no_float32() -> None:
    moments, basis = drawn_layer(12, 10).moments(torch.float32), random_basis((12, 10), RANK)
    scaled = replace(moments, cross=1e-18 * moments.cross, error_square=1e-36 * moments.error_square)
    plain, small = measure_capture(moments, basis), measure_capture(scaled, basis)
    assert small.values == pytest.approx(plain.values, rel=1e-4)
    assert small.energy == pytest.approx(plain.energy, rel=1e-4)
    assert small.gradient == pytest.approx(1e-18 * plain.gradient, rel=1e-4)
    assert small.gradient_total == pytest.approx(1e-18 * plain.gradient_total, rel=1e-4)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, basis = drawn_layer(12, 10).moments(), random_basis((12, 10), RANK)
    whole = measure_capture(moments, basis)
    monkeypatch.setattr(capture_module, "BLOCK_VALUES", 37)  # three rows, and one at the end
    split = measure_capture(moments, basis)
    assert split.values == pytest.approx(whole.values, rel=1e-12)
    assert (split.energy, split.gradient) == (pytest.approx(whole.energy), pytest.approx(whole.gradient))


def test_without_a_gradient_nothing_is_captured_and_nothing_fails() -> None:
    moments = drawn_layer(12, 10).moments()
    silent = replace(moments, cross=torch.zeros(12, 10), error_square=torch.zeros(12))
    found = measure_capture(silent, random_basis((12, 10), RANK))
    assert found == Capture(0.0, 0.0, (0.0, 0.0, 0.0), 0.0, max_over_median(moments.a), float("inf"))
    assert (found.J, found.effective_rank, found.participation) == (0.0, 0, 0.0)
