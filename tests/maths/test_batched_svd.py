"""Truncated SVDs of a batch against one at a time, and against NumPy's in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from frozencore.errors import CalibrationError
from frozencore.maths import linalg
from frozencore.maths.linalg import TruncatedSVD, principal_cosines, truncated_svd, truncated_svds

RANK = 8
GRAM, WIDE, TALL = (40, 60), (300, 340), (340, 300)  # up to 256 the Gram eigenproblem, above it the Krylov space


def decaying(m: int, n: int, exponent: float, seed: int, rank: int | None = None) -> torch.Tensor:
    """Singular values i^-exponent, none beyond ``rank``."""
    rng = np.random.default_rng(seed)
    k = min(m, n) if rank is None else rank
    U, V = (np.linalg.qr(rng.normal(size=(width, k)))[0] for width in (m, n))
    return torch.tensor(U * np.arange(1.0, k + 1) ** -exponent @ V.T, dtype=torch.float32)


def assert_leading(svd: TruncatedSVD, M: torch.Tensor) -> None:
    """Orthonormal, of the right values, and of the space that holds as much of M as any."""
    expected = np.linalg.svd(M.double().numpy(), compute_uv=False)[:RANK]
    np.testing.assert_allclose(svd.S.numpy(), expected, rtol=2e-3, atol=2e-6 * expected[0])
    for X in (svd.U, svd.V):
        torch.testing.assert_close(X.mT @ X, torch.eye(RANK), atol=1e-5, rtol=0)
    captured = float((M.double().mT @ svd.U.double()).square().sum())
    assert captured == pytest.approx((expected**2).sum(), rel=1e-5)
    torch.testing.assert_close(M.mT @ svd.U, svd.V * svd.S, atol=2e-4 * float(expected[0]), rtol=0)


@pytest.mark.parametrize("shape", [GRAM, GRAM[::-1], WIDE, TALL])
@pytest.mark.parametrize("exponent", [0.3, 1.0])
def test_a_batch_has_the_triples_of_each_of_its_matrices(shape: tuple[int, int], exponent: float) -> None:
    M = torch.stack([decaying(*shape, exponent, seed) * 10.0**seed for seed in range(3)])
    for i, svd in enumerate(truncated_svds(M, RANK, seeds=[5, 6, 7])):
        assert_leading(svd, M[i])
        alone = truncated_svd(M[i], RANK, seed=5 + i)
        assert float(principal_cosines(svd.U, alone.U).min()) > 0.99
        assert [part.dtype for part in svd] == [torch.float32] * 3


@pytest.mark.parametrize("shape", [GRAM, WIDE])
def test_a_matrix_of_low_rank_is_done_by_itself_and_its_neighbours_are_not(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[torch.Tensor] = []

    def counted(M: torch.Tensor, rank: int, *, seed: int) -> TruncatedSVD:
        alone.append(M)
        return truncated_svd(M, rank, seed=seed)

    monkeypatch.setattr(linalg, "truncated_svd", counted)
    M = torch.stack([decaying(*shape, 0.5, 1), decaying(*shape, 0.5, 2, rank=3), torch.zeros(shape)])
    found = truncated_svds(M, RANK, seeds=[1, 2, 3])
    assert len(alone) == 2
    assert_leading(found[0], M[0])
    for svd, (one, seed) in zip(found[1:], zip(M[1:], (2, 3), strict=True), strict=True):
        assert all(torch.equal(*pair) for pair in zip(svd, truncated_svd(one, RANK, seed=seed), strict=True))


@pytest.mark.parametrize("shape", [GRAM, WIDE])
def test_what_stands_beside_a_matrix_does_not_change_it(shape: tuple[int, int]) -> None:
    M = torch.stack([decaying(*shape, 0.5, seed) for seed in range(3)])
    together = truncated_svds(M, RANK, seeds=[1, 2, 3])
    for one, svd in zip(truncated_svds(M[1:2], RANK, seeds=[2]), together[1:2], strict=True):
        assert float(principal_cosines(one.U, svd.U).min()) > 1 - 1e-6
        assert float(principal_cosines(one.V, svd.V).min()) > 1 - 1e-6


@pytest.mark.parametrize("spoil", [lambda M: M.fill_(float("nan")), lambda M: M[0].fill_(float("inf"))])
def test_what_is_not_finite_is_refused(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    M = torch.stack([decaying(*GRAM, 0.5, seed) for seed in range(2)])
    spoil(M[1])
    with pytest.raises(CalibrationError, match="NaN or Inf"):
        truncated_svds(M, RANK, seeds=[1, 2])
