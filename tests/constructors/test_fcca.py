"""FCCA and RawGrad: whitening sides, dense factors, and the limits of damping."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

import references as ref
from drawn import drawn_layer
from frozencore.constructors import fcca_basis, rawgrad_basis
from frozencore.maths.basis import Basis
from frozencore.maths.whitening import Sides, Whitening
from references import numpy_of

HUGE = 1e9


def assert_same_spans(one: Basis, other: Basis, tolerance: float = 1e-5) -> None:
    assert ref.span_distance(numpy_of(one.P), numpy_of(other.P)) < tolerance
    assert ref.span_distance(numpy_of(one.Q), numpy_of(other.Q)) < tolerance


@pytest.mark.parametrize("sides", get_args(Sides))
@pytest.mark.parametrize(("dense", "shrinkage"), [(False, 0.0), (True, 0.0), (True, 0.5)])
@pytest.mark.parametrize("c", [1e-3, 1.0])
def test_every_metric_equals_the_reference(sides: str, dense: bool, shrinkage: float, c: float) -> None:
    layer = drawn_layer(seed=3)
    whitening = Whitening(sides=sides, fisher="dense" if dense else "diagonal", shrinkage=shrinkage, damping=(c, 2 * c))
    basis = fcca_basis(layer.moments(), 4, whitening=whitening)
    P0, Q0 = ref.fcca_factors(
        layer.reference(), 4, c_input=c, c_output=2 * c, sides=sides, dense=dense, shrinkage=shrinkage
    )
    assert ref.span_distance(numpy_of(basis.P), P0) < 1e-5
    assert ref.span_distance(numpy_of(basis.Q), Q0) < 1e-5


def test_raw_coordinates_are_the_papers_factors_up_to_sign() -> None:
    layer = drawn_layer()
    basis = fcca_basis(layer.moments(), 4, coordinates="raw")
    P0, Q0 = ref.fcca_factors(layer.reference(), 4)
    np.testing.assert_allclose(np.abs(numpy_of(basis.P)), np.abs(P0), rtol=1e-4, atol=1e-5 * np.abs(P0).max())
    np.testing.assert_allclose(np.abs(numpy_of(basis.Q)), np.abs(Q0), rtol=1e-4, atol=1e-5 * np.abs(Q0).max())


def test_the_spectrum_is_that_of_the_whitened_moment() -> None:
    layer = drawn_layer()
    e = layer.reference()
    A, D = (ref.damped_matrix(np.diag(M), 1e-3) for M in (e.A, e.D))
    expected = ref.svd(ref.whitened(e.G, A, D))[1][:4]
    np.testing.assert_allclose(numpy_of(fcca_basis(layer.moments(), 4).spectrum), expected, rtol=1e-5)


@pytest.mark.parametrize("fisher", ["diagonal", "dense"])
def test_damping_both_sides_without_limit_is_rawgrad(fisher: str) -> None:
    moments = drawn_layer().moments()
    limit = fcca_basis(moments, 4, whitening=Whitening(fisher=fisher, damping=HUGE))
    assert_same_spans(limit, rawgrad_basis(moments, 4))
    torch.testing.assert_close(limit.P, rawgrad_basis(moments, 4).P, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("damping", "sides"), [((HUGE, 1e-3), "output"), ((1e-3, HUGE), "input")])
@pytest.mark.parametrize("fisher", ["diagonal", "dense"])
def test_damping_one_side_without_limit_whitens_the_other_alone(fisher: str, damping: tuple, sides: str) -> None:
    moments = drawn_layer().moments()
    limit = fcca_basis(moments, 4, whitening=Whitening(fisher=fisher, damping=damping))
    assert_same_spans(limit, fcca_basis(moments, 4, whitening=Whitening(sides=sides, fisher=fisher)))


def test_dense_factors_shrunk_all_the_way_give_the_diagonal_basis() -> None:
    moments = drawn_layer().moments()
    dense = fcca_basis(moments, 4, whitening=Whitening(fisher="dense", shrinkage=1.0))
    torch.testing.assert_close(dense.P, fcca_basis(moments, 4).P, atol=1e-5, rtol=0)


def test_fcca_and_rawgrad_differ_where_scales_differ() -> None:
    moments = drawn_layer(spread=3).moments()
    cosines = ref.principal_cosines(numpy_of(fcca_basis(moments, 4).P), numpy_of(rawgrad_basis(moments, 4).P))
    assert cosines.min() < 0.9


def test_whitening_undoes_a_change_of_units() -> None:
    """FCCA's update family is covariant: scaling input and output coordinates scales its factors alike."""
    layer = drawn_layer()
    rng = np.random.default_rng(7)
    u, v = 10 ** rng.uniform(-1, 1, 10), 10 ** rng.uniform(-1, 1, 12)
    whitening = Whitening(damping=1e-12)
    scaled = type(layer)(layer.X * u, layer.E * v, layer.W)
    one, other = (fcca_basis(each.moments(), 4, whitening=whitening) for each in (layer, scaled))
    # x → u∘x, δ → v∘δ: a direction q of the inputs becomes q/u, one of the outputs p/v.
    assert ref.span_distance(numpy_of(other.Q), numpy_of(one.Q) / u[:, None]) < 1e-4
    assert ref.span_distance(numpy_of(other.P), numpy_of(one.P) / v[:, None]) < 1e-4
