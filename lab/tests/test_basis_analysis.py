"""Theorem 1 of the paper, and the numbers of a basis, against token-by-token float64 references."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import references as ref
from fixtures import tried
from frozencore import fcca_basis, rawgrad_basis
from frozencore.adapter.basis import Basis
from frozencore.constructors import CONSTRUCTORS, BasisOptions, build_basis
from frozencore.maths.basis import Coordinates, LayerBasis, known_basis
from frozencore.maths.whitening import Whitening
from frozencore_lab.basis_analysis import analyse, coherence
from references import Array, numpy_of
from tiny import DrawnLayer, drawn_layer

RANK = 3


def metric(layer: DrawnLayer, c: float, dense: bool) -> tuple[Array, Array, Array]:
    """G and the damped A and D of a layer, as matrices."""
    e = layer.reference()
    return e.G, ref.damped_matrix(e.A if dense else np.diag(e.A), c), ref.damped_matrix(
        e.D if dense else np.diag(e.D), c
    )  # fmt: skip


def best_update(G: Array, A: Array, D: Array, basis: LayerBasis, eta: float) -> Array:
    """The update in the span of a basis that minimises equation 1."""
    P, Q = numpy_of(basis.P), numpy_of(basis.Q)
    return P @ ref.best_core(G, A, D, P, Q, eta, s=1.0) @ Q.T


@pytest.mark.parametrize("coordinates", get_args(Coordinates))
@pytest.mark.parametrize("fisher", ["diagonal", "dense"])
def test_in_the_fcca_span_it_is_the_update_of_theorem_one(fisher: str, coordinates: str) -> None:
    """ΔW* = -η D^-½ [T]_r A^-½, whatever the coordinates of the core."""
    layer, eta = drawn_layer(), 0.7
    G, A, D = metric(layer, 1e-2, fisher == "dense")
    basis = fcca_basis(layer.moments(), RANK, whitening=Whitening(fisher=fisher, damping=1e-2), coordinates=coordinates)
    expected = -eta * ref.power(D, -0.5) @ ref.truncated(ref.whitened(G, A, D), RANK) @ ref.power(A, -0.5)
    np.testing.assert_allclose(
        best_update(G, A, D, basis, eta), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


@tried(0.5)
@given(seed=st.integers(0, 10_000), c=st.sampled_from([1e-4, 1e-2, 1.0]), eta=st.floats(0.01, 10), nearby=st.booleans())
def test_theorem_one_no_rank_r_step_does_better(seed: int, c: float, eta: float, nearby: bool) -> None:
    """Against random steps at their best length, and against perturbations of the optimum itself."""
    layer = drawn_layer(m=6, n=7, num_tokens=40, seed=seed)
    G, A, D = metric(layer, c, dense=False)
    basis = fcca_basis(layer.moments(), RANK, whitening=Whitening(damping=c))
    optimum = best_update(G, A, D, basis, eta)
    best = ref.objective(G, A, D, optimum, eta)
    assert best == pytest.approx(-eta / 2 * (ref.svd(ref.whitened(G, A, D))[1][:RANK] ** 2).sum(), rel=1e-5)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        left, right = rng.normal(size=(6, RANK)), rng.normal(size=(RANK, 7))
        if nearby:
            U, S, V = ref.svd(optimum)
            size = 10 ** rng.uniform(-4, 0)
            left = U[:, :RANK] * S[:RANK] + size * S[0] * left
            right = V[:, :RANK].T + size * right
        step = left @ right
        length = -eta * (G * step).sum() / np.linalg.norm(ref.power(D, 0.5) @ step @ ref.power(A, 0.5)) ** 2
        for candidate in (step, length * step):
            assert ref.objective(G, A, D, candidate, eta) >= best - 1e-6 * abs(best)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_j_and_the_best_objective_do_not_depend_on_coordinates(constructor: str) -> None:
    layer, eta = drawn_layer(), 0.5
    G, A, D = metric(layer, 1e-2, dense=False)
    found = []
    for coordinates in get_args(Coordinates):
        basis = build_basis(constructor, layer.evidence(), BasisOptions(r=RANK, coordinates=coordinates))
        found.append(ref.captured(G, A, D, numpy_of(basis.P), numpy_of(basis.Q)))
        # The objective at its best is -η/2 J: only the spans matter.
        assert ref.objective(G, A, D, best_update(G, A, D, basis, eta), eta) == pytest.approx(
            -eta / 2 * found[-1], rel=1e-4
        )
    assert found == pytest.approx([found[0]] * len(found), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_fcca_has_the_largest_j_and_rawgrad_the_largest_projected_gradient(seed: int) -> None:
    layer = drawn_layer(m=14, n=11, seed=seed)
    G, A, D = metric(layer, 1e-3, dense=False)
    correlations, norms = {}, {}
    for name in CONSTRUCTORS:
        basis = build_basis(name, layer.evidence(), BasisOptions(r=RANK, seed=seed, coordinates="qr"))
        P, Q = numpy_of(basis.P), numpy_of(basis.Q)
        correlations[name] = ref.captured(G, A, D, P, Q)
        norms[name] = np.linalg.norm(P.T @ G @ Q)
    assert max(correlations, key=correlations.__getitem__) == "fcca"
    assert max(norms, key=norms.__getitem__) == "rawgrad"
    assert correlations["fcca"] == pytest.approx((ref.svd(ref.whitened(G, A, D))[1][:RANK] ** 2).sum(), rel=1e-5)
    assert norms["rawgrad"] == pytest.approx(np.linalg.norm(ref.svd(G)[1][:RANK]), rel=1e-5)


def test_coherence_of_coordinates_and_of_an_even_basis() -> None:
    assert coherence(torch.eye(8)[:, :2]) == pytest.approx(4.0)
    hadamard = torch.tensor([[1.0, 1], [1, -1], [1, 1], [1, -1]]) / 2
    assert coherence(hadamard) == pytest.approx(1.0)
    assert coherence(hadamard @ torch.randn(2, 2)) == pytest.approx(1.0)


def test_rawgrad_holds_the_most_gradient_and_fcca_all_of_j_and_without_a_gradient_both_are_zero() -> None:
    moments = drawn_layer(12, 20).moments(torch.float32)
    S = torch.linalg.svdvals(moments.G.double()).square()
    bases = {"raw": rawgrad_basis(moments, 4), "fcca": fcca_basis(moments, 4)}
    silent = replace(moments, cross=torch.zeros(12, 20), error_square=torch.zeros(12))
    found = analyse(Basis(bases, options={"damping": 1e-3}), moments={"raw": moments, "fcca": moments})
    assert found["raw"]["gradient_share"] == pytest.approx(float((S[:4].sum() / S.sum()).sqrt()), rel=1e-5)
    assert found["fcca"]["gradient_share"] < found["raw"]["gradient_share"] < 1
    assert found["raw"]["J_share_of_best"] < found["fcca"]["J_share_of_best"] == pytest.approx(1, abs=1e-5)
    none = analyse(Basis(bases, options={"damping": 1e-3}), moments=dict.fromkeys(bases, silent))["raw"]
    assert (none["gradient_share"], none["J_share_of_best"]) == (0, 0)


def test_angles_are_one_to_itself_in_other_coordinates_and_zero_to_the_complement() -> None:
    basis, eye = fcca_basis(drawn_layer(12, 20).moments(torch.float32), 4), torch.eye(12)
    pairs = {
        "same": (basis, known_basis(basis.P @ torch.randn(4, 4), basis.Q)),
        "apart": (known_basis(eye[:, :4], basis.Q), known_basis(eye[:, 4:8], basis.Q)),
    }
    one, other = (Basis({name: pair[i] for name, pair in pairs.items()}, options={}) for i in (0, 1))
    found = analyse(one, other=other)
    assert (found["same"]["cosine_P"], found["same"]["cosine_Q"]) == (pytest.approx(1), pytest.approx(1))
    assert found["apart"]["cosine_P"] == pytest.approx(0, abs=1e-6)
