"""Estimate the gain of a direction beyond noise from two halves of the calibration set (not in the paper).

T₁, T₂: the matrix whose singular directions a basis takes, computed from each half of the examples
    C₁ = U₁ᵀ T₂ V₁,  C₂ = U₂ᵀ T₁ V₂        with the leading directions of each half:  T₁ ≈ U₁ Σ₁ V₁ᵀ,  T₂ ≈ U₂ Σ₂ V₂ᵀ

The k-th diagonal entry of C₁ measures the k-th direction of one half on the other half, which did not choose it. The
entry is σ_k where the halves agree, and noise around zero where they do not. The other entries of its row and column
show how large this noise is. Singular values alone do not show the noise: pure noise has large ones too.

Shapes: T m x n, K directions.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float

from frozencore.maths.linalg import SvdMethod, TruncatedSVD, prefers_krylov, require_finite, truncated_svd
from frozencore.torch_later import torch

NOISE_LEVELS = 2.0  # standard deviations of the noise that a direction must exceed in both halves


def agreed_gains(
    T1: Float[torch.Tensor, "m n"],
    T2: Float[torch.Tensor, "m n"],
    count: int,
    *,
    svd_method: SvdMethod = "auto",
    seed: int = 0,
) -> Float[torch.Tensor, " k"]:
    """Estimate the gains of the ``count`` leading directions: σ_k² if both halves are equal, 0 where they disagree.

    Raises:
        CalibrationError: A matrix is not finite.
    """
    crossed = []
    for own, other in ((T1, T2), (T2, T1)):
        U, _, V = truncated_svd(own, count, method=svd_method, seed=seed)
        crossed.append(U.mT @ other @ V)
    return gains_of(*crossed)


class Crossed(NamedTuple):
    """C₁, C₂ and T₁'s triples. The upper left corners of C₁ and C₂ belong to fewer leading directions."""

    C1: Float[torch.Tensor, "k k"]
    C2: Float[torch.Tensor, "k k"]
    first: TruncatedSVD


def crossed_by_gram(T1: Float[torch.Tensor, "m n"], T2: Float[torch.Tensor, "m n"], count: int) -> Crossed:
    """Compute C₁ and C₂ of the ``count`` leading directions, with one eigenproblem a matrix.

    The rounding error of the eigenproblem is far below the noise.

    Raises:
        CalibrationError: A matrix is not finite.
    """
    one, two = (_leading(T, count) for T in (T1, T2))
    C1, C2 = one.U.mT @ T2.double() @ one.V, two.U.mT @ T1.double() @ two.V
    return Crossed(C1, C2, one)


def _leading(T: torch.Tensor, count: int) -> TruncatedSVD:
    require_finite(T)
    if len(T) > T.shape[1]:
        V, S, U = _leading(T.mT, count)
        return TruncatedSVD(U, S, V)
    if prefers_krylov(T, count):
        return TruncatedSVD(*(part.double() for part in truncated_svd(T, count)))
    X = T.double()
    squares, U = torch.linalg.eigh(X @ X.mT)
    U, S = U[:, -count:].flip(1), squares[-count:].flip(0).clamp_min(0).sqrt()
    # a direction of pure rounding leaves V short, so that it agrees with nothing
    floor = (torch.finfo(X.dtype).eps ** 0.5 * S[0]).clamp_min(torch.finfo(X.dtype).tiny)
    return TruncatedSVD(U, S, (X.mT @ U) / S.clamp_min(floor))


def gains_of(C1: Float[torch.Tensor, "k k"], C2: Float[torch.Tensor, "k k"]) -> Float[torch.Tensor, " k"]:
    """The gains from C₁ and C₂."""
    first, second = C1.double(), C2.double()
    agree = (first.diagonal() > NOISE_LEVELS * _noise(first)) & (second.diagonal() > NOISE_LEVELS * _noise(second))
    return torch.where(agree, first.diagonal() * second.diagonal(), 0.0)


def _noise(C: Float[torch.Tensor, "k k"]) -> Float[torch.Tensor, " k"]:
    """The root mean square of the other entries in each direction's row and column; 0 for a single direction."""
    squares = C.square() - torch.diag(C.diagonal().square())
    return ((squares.sum(0) + squares.sum(1)) / max(1, 2 * (len(C) - 1))).sqrt()
