"""The gain of a direction beyond noise, estimated from two halves of the calibration set (not in the paper).

    T₁, T₂: the matrix whose singular directions a basis takes, of one half of the examples and of the other
    C₁ = U₁ᵀ T₂ V₁,  C₂ = U₂ᵀ T₁ V₂        with the leading directions of each half:  T₁ ≈ U₁ Σ₁ V₁ᵀ,  T₂ ≈ U₂ Σ₂ V₂ᵀ

The k-th diagonal entry of C₁ measures the k-th direction of one half on the other half, which did not choose it: it is
σ_k where the halves agree, and noise around zero where they do not. The other entries of its row and column show how
large this noise is. The singular values themselves do not show it: pure noise has large ones too.

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
    """The gain of each of the ``count`` leading directions: σ_k² if both halves are the same, 0 where they disagree.

    Raises:
        CalibrationError: A matrix is not finite.
    """
    crossed = []
    for own, other in ((T1, T2), (T2, T1)):
        U, _, V = truncated_svd(own, count, method=svd_method, seed=seed)
        crossed.append(U.mT @ other @ V)
    return gains_of(*crossed)


class Crossed(NamedTuple):
    """C₁, C₂ and T₁'s triples. For fewer leading directions take the upper left corners of C₁ and C₂."""

    C1: Float[torch.Tensor, "k k"]
    C2: Float[torch.Tensor, "k k"]
    first: TruncatedSVD


def crossed_by_gram(T1: Float[torch.Tensor, "m n"], T2: Float[torch.Tensor, "m n"], count: int) -> Crossed:
    """C₁ and C₂ of the ``count`` leading directions, by one eigenproblem a matrix; its rounding is far below noise.

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
    # where rounding is all there is, V is left too short to agree with anything
    floor = (torch.finfo(X.dtype).eps ** 0.5 * S[0]).clamp_min(torch.finfo(X.dtype).tiny)
    return TruncatedSVD(U, S, (X.mT @ U) / S.clamp_min(floor))


def gains_of(C1: Float[torch.Tensor, "k k"], C2: Float[torch.Tensor, "k k"]) -> Float[torch.Tensor, " k"]:
    """The gains from C₁ and C₂."""
    first, second = C1.double(), C2.double()
    agree = (first.diagonal() > NOISE_LEVELS * _noise(first)) & (second.diagonal() > NOISE_LEVELS * _noise(second))
    return torch.where(agree, first.diagonal() * second.diagonal(), 0.0)


def _noise(C: Float[torch.Tensor, "k k"]) -> Float[torch.Tensor, " k"]:
    """By direction, the root mean square of the other entries in its row and column; 0 for a single direction."""
    squares = C.square() - torch.diag(C.diagonal().square())
    return ((squares.sum(0) + squares.sum(1)) / max(1, 2 * (len(C) - 1))).sqrt()
