"""Truncated SVDs of many matrices of one shape, with one batched call for each step.

Single SVDs would spend a GPU's time on kernel launches. The method is that of
:func:`frozencore.maths.linalg.truncated_svd` (a Gram eigenproblem, a block Krylov space). Columns are orthonormalised
twice by Cholesky factors of Gram matrices in float64, because a batched QR runs matrix by matrix.

A matrix for which this is not exact enough (low rank, ill-conditioned) is done alone. The device is synchronised once.

Shapes: M b x m x n, rank r, Krylov blocks of k columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Float

from frozencore.maths.linalg import (
    KRYLOV_BLOCKS,
    KRYLOV_WIDTH,
    TruncatedSVD,
    canonical_signs,
    krylov_start,
    prefers_krylov,
    require_finite,
    truncated_svd,
)

SMALLEST = 1e-5  # relative to the largest singular value: a smaller direction takes the exact method
LEAST_ORTHONORMAL = 1e-5


def truncated_svds(M: Float[torch.Tensor, "b m n"], rank: int, *, seeds: Sequence[int]) -> list[TruncatedSVD]:
    """The ``min(rank, m, n)`` leading singular triples of each matrix, with canonical signs.

    Args:
        seeds: The seed of each matrix's random start, as for :func:`truncated_svd`.

    Raises:
        CalibrationError: A matrix is not finite.
    """
    require_finite(M)
    rank = min(rank, *M.shape[1:])
    triples, is_good = (_krylov if prefers_krylov(M[0], rank) else _gram)(M, rank, seeds)
    found = zip(*canonical_signs(*triples), strict=True)
    return [
        TruncatedSVD(*triple) if good else truncated_svd(M[i], rank, seed=seeds[i])
        for i, (triple, good) in enumerate(zip(found, is_good.tolist(), strict=True))
    ]


def _gram(
    M: torch.Tensor, rank: int, _: Sequence[int]
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Bool[torch.Tensor, " b"]]:
    if M.shape[1] > M.shape[2]:
        (V, S, U), is_good = _gram(M.mT, rank, _)
        return (U, S, V), is_good
    X = M.double()
    U = torch.linalg.eigh(X @ X.mT).eigenvectors[..., -rank:].flip(-1)
    (V, S, U), is_good = _triples(X.mT, U)
    return (U.to(M.dtype), S.to(M.dtype), V.to(M.dtype)), is_good


def _krylov(
    M: torch.Tensor, rank: int, seeds: Sequence[int]
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Bool[torch.Tensor, " b"]]:
    """Run block Golub-Kahan on all matrices together."""
    start = torch.stack([krylov_start(M[0], KRYLOV_WIDTH * rank, seed) for seed in seeds]).to(M.device, M.dtype)
    V, is_good = _orthonormal(M.mT @ start)
    images = [M @ V]
    for _ in range(KRYLOV_BLOCKS - 1):
        left, fine = _orthonormal(images[-1])
        block = M.mT @ left
        is_good &= fine
        for _ in range(2):  # a second pass of Gram-Schmidt removes the round-off of the first
            block, fine = _orthonormal(block - V @ (V.mT @ block))
            is_good &= fine
        V = torch.cat([V, block], dim=-1)
        images.append(M @ block)
    image = torch.cat(images, dim=-1).double()
    turn = torch.linalg.eigh(image.mT @ image).eigenvectors[..., -rank:].flip(-1)
    right, fine = _orthonormal(V @ turn.to(V.dtype))
    triples, exact = _triples(M, right)
    return triples, is_good & fine & exact & _is_orthonormal(V)


def _triples(
    M: torch.Tensor, right: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Bool[torch.Tensor, " b"]]:
    """Compute U, S and V of each matrix from its right singular vectors (b x n x r), largest first."""
    image = M @ right
    S = torch.linalg.vector_norm(image, dim=-2)
    U, is_good = _orthonormal(image)
    falls = torch.stack([before >= after * (1 - 1e-4) for before, after in pairwise(S.unbind(-1))] or [S[:, 0] >= 0])
    return (U, S, right), is_good & (S[:, -1] > SMALLEST * S[:, 0]) & falls.all(0)


def _orthonormal(X: torch.Tensor) -> tuple[torch.Tensor, Bool[torch.Tensor, " b"]]:
    """Orthonormalise the columns in their order, and tell for which matrices that succeeded."""
    Q = X.double()
    is_good = torch.ones(len(X), dtype=torch.bool, device=X.device)
    for _ in range(2):  # the first pass leaves an error of the condition number squared, the second none
        factor, failed = torch.linalg.cholesky_ex(Q.mT @ Q, upper=True)
        Q = torch.linalg.solve_triangular(factor, Q, upper=True, left=False)
        is_good &= failed == 0
    return Q.to(X.dtype), is_good


def _is_orthonormal(V: torch.Tensor) -> Bool[torch.Tensor, " b"]:
    """Return whether each V is orthonormal; a V with NaN is not."""
    eye = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    return (V.mT @ V - eye).abs().amax((-1, -2)) < LEAST_ORTHONORMAL
