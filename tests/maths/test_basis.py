"""Coordinates of a basis: what they keep, what they change, and how missing directions are filled."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

import references as ref
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.capture import core_gradient
from references import numpy_of


def anisotropic(m: int, r: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(m, r)) * 10 ** rng.uniform(-2, 2, size=(1, r)))


def made(coordinates: str, k: int = 4, rank: int = 4, **options: Any) -> tuple[torch.Tensor, torch.Tensor, LayerBasis]:
    P0, Q0 = anisotropic(12, k, 0), anisotropic(9, k, 1)
    basis = basis_from_factors(P0, Q0, rank=rank, spectrum=torch.ones(k), coordinates=coordinates, **options)
    return P0, Q0, basis


@pytest.mark.parametrize("coordinates", get_args(Coordinates))
def test_every_update_in_raw_factors_is_an_update_in_any_coordinates(coordinates: str) -> None:
    """P₀ Z Q₀ᵀ = P (T_P Z T_Qᵀ) Qᵀ (paper, section 3.3)."""
    P0, Q0, basis = made(coordinates)
    P, Q, Z = numpy_of(basis.P), numpy_of(basis.Q), np.random.default_rng(2).normal(size=(4, 4))
    update = numpy_of(P0) @ Z @ numpy_of(Q0).T
    core = np.linalg.pinv(P) @ update @ np.linalg.pinv(Q).T
    np.testing.assert_allclose(P @ core @ Q.T, update, rtol=1e-4, atol=1e-5 * np.abs(update).max())


def test_qr_is_orthonormal_with_a_positive_diagonal() -> None:
    P0, _, basis = made("qr")
    assert basis.orthonormality_error() < 1e-6
    T = numpy_of(basis.P).T @ numpy_of(P0)
    assert (np.diag(T) > 0).all()
    np.testing.assert_allclose(np.tril(T, -1), 0, atol=1e-5 * np.abs(T).max())


def test_raw_is_the_factor_itself_and_scaled_raw_differs_by_one_scalar() -> None:
    P0, Q0, raw = made("raw")
    scaled = made("scaled_raw")[2]
    torch.testing.assert_close(raw.P, P0.float(), rtol=0, atol=0)
    torch.testing.assert_close(raw.Q, Q0.float(), rtol=0, atol=0)
    for X0, X in ((P0, scaled.P), (Q0, scaled.Q)):
        ratio = X.double() / X0
        torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-6, atol=0)
        assert float(X.norm()) == pytest.approx(2.0, rel=1e-6)  # of four orthonormal columns


@pytest.mark.parametrize("coordinates", get_args(Coordinates))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_missing_directions_are_orthonormal_to_the_rest_in_every_coordinates(coordinates: str, k: int) -> None:
    P0, Q0, basis = made(coordinates, k=k, rank=6, seed=5)
    assert basis.rank == 6
    assert basis.effective_rank == k
    for X0, X in ((P0, basis.P), (Q0, basis.Q)):
        extra = numpy_of(X)[:, k:]
        np.testing.assert_allclose(extra.T @ extra, np.eye(6 - k), atol=1e-6)
        if k:
            kept = numpy_of(X)[:, :k]
            np.testing.assert_allclose(extra.T @ kept / np.linalg.norm(kept, axis=0), 0, atol=1e-6)
            assert ref.span_distance(kept, numpy_of(X0)) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["P", "Q"])
def test_a_factor_that_is_not_finite_is_refused(bad: float, side: str) -> None:
    P0, Q0 = torch.ones(4, 2), torch.ones(3, 2)
    (P0 if side == "P" else Q0)[1, 1] = bad
    with pytest.raises(CalibrationError, match=f"raw factor {side} has NaN or Inf"):
        basis_from_factors(P0, Q0, rank=2, spectrum=torch.ones(2), coordinates="qr")


@pytest.mark.usefixtures("as_a_user")
def test_unknown_coordinates_are_refused() -> None:
    with pytest.raises(AssertionError, match="'lu'"):
        made("lu")


def uneven(size: int, seed: int) -> torch.Tensor:
    """A second moment whose largest channel is a hundred times the smallest one."""
    return torch.tensor(10 ** np.random.default_rng(seed).normal(0, 0.8, size=size), dtype=torch.float32)


def test_in_fisher_coordinates_each_direction_reads_as_much_as_a_random_one() -> None:
    a, d = uneven(9, 3), uneven(12, 4)
    _, _, basis = made("fisher", diagonals=lambda: (d, a))
    for X, second in ((numpy_of(basis.P), numpy_of(d)), (numpy_of(basis.Q), numpy_of(a))):
        np.testing.assert_allclose(X.T @ (second[:, None] * X), second.mean() * np.eye(4), atol=1e-4 * second.mean())


def test_a_direction_that_the_data_hardly_reach_is_lengthened_within_bounds() -> None:
    a = torch.tensor([1e-12] * 4 + [1.0] * 5)
    basis = basis_from_factors(
        torch.eye(12)[:, :4], torch.eye(9)[:, :4], rank=4, spectrum=torch.ones(4), coordinates="fisher",
        diagonals=lambda: (torch.ones(12), a),
    )  # fmt: skip
    torch.testing.assert_close(basis.Q.norm(dim=0), torch.full((4,), 1000**0.5), rtol=1e-4, atol=0)


def test_in_fisher_coordinates_the_closed_form_core_is_the_gradient_itself() -> None:
    """R* = -(PᵀDP)^-1 PᵀGQ (QᵀAQ)^-1 (docs/method.md) needs no division there: steepest descent is Newton's step."""
    a, d = uneven(9, 3), uneven(12, 4)
    G = torch.randn(12, 9, generator=torch.Generator().manual_seed(5))
    _, _, basis = made("fisher", diagonals=lambda: (d, a))
    letters = (numpy_of(X) for X in (G, a.diag(), d.diag(), basis.P, basis.Q))
    newton = torch.from_numpy(ref.best_core(*letters, 1.0, 1.0))
    torch.testing.assert_close(newton.double(), -core_gradient(G, basis) / (a.mean() * d.mean()), rtol=1e-4, atol=1e-4)


def test_fisher_coordinates_of_even_channels_are_orthonormal_ones() -> None:
    even = torch.full((12,), 1e-9), torch.full((9,), 0.3)
    plain, fisher = (made(name, diagonals=lambda: even)[2] for name in ("qr", "fisher"))
    torch.testing.assert_close(fisher.P, plain.P, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(fisher.Q, plain.Q, rtol=1e-3, atol=1e-6)


def test_a_side_that_was_not_measured_is_orthonormal() -> None:
    half, none = (made("fisher", diagonals=diagonals)[2] for diagonals in (lambda: (None, uneven(9, 3)), None))
    for X in (half.P, none.P, none.Q):
        torch.testing.assert_close(X.mT @ X, torch.eye(4), rtol=0, atol=1e-6)
