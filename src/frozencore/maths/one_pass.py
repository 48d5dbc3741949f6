"""The leading singular triples of a matrix T of which one pass has seen what it does to two sets of directions.

    Y = T V (m x k),   Z = Tᵀ U (n x k),   U and V known, of orthonormal columns once ``C = Uᵀ T V`` is taken out

    T = U C Vᵀ + A Vᵀ + U Bᵀ + E,   A = (I - UUᵀ) Y,   B = (I - VVᵀ) Z

E, outside of both spans, was not seen. Zero is the least that it can be; ``A C⁺ Bᵀ`` is what it would be if T had no
more rank than C, and without a ridge its small singular values make most of it up. So the ridge is wide. On sums of
gradients of a real training (docs/refreshing.md), where U and V come from the round before, half of the largest
singular value of C was best among 0.1 to 1 and no E at all. Tests V and U that are drawn at random do not find the
directions of such spectra, however T is put together.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.maths.linalg import TruncatedSVD, canonical_signs

RIDGE = 0.5  # of the largest singular value of C

Product = tuple[Float[Tensor, "m j"], Float[Tensor, "n j"]]
"""L and R of a matrix ``L Rᵀ``."""


def from_one_pass(
    Y: Float[Tensor, "m k"], Z: Float[Tensor, "n k"], U: Float[Tensor, "m k"], V: Float[Tensor, "n k"]
) -> Product:
    """L (m x 2k) and R (n x 2k) of the estimate ``L Rᵀ`` of T.

    Args:
        U, V: Of full column rank; they need not be orthonormal.
    """
    U, Z = _orthonormal(U, Z)
    V, Y = _orthonormal(V, Y)
    C = U.mT @ Y
    A, B = Y - U @ C, Z - V @ C.mT
    left, S, right = torch.linalg.svd(C)
    inverse = (right.mT * (S / (S**2 + (RIDGE * S[:1]) ** 2).clamp_min(torch.finfo(S.dtype).tiny))) @ left.mT
    return torch.cat([U @ C + A, U + A @ inverse], dim=1), torch.cat([V, B], dim=1)


def svd_of_product(product: Product, rank: int) -> TruncatedSVD:
    """The ``rank`` leading singular triples of ``L Rᵀ``, with canonical signs; without an m x n matrix."""
    (Q_left, left), (Q_right, right) = (torch.linalg.qr(factor) for factor in product)
    U, S, Vh = torch.linalg.svd(left @ right.mT)
    return TruncatedSVD(*canonical_signs(Q_left @ U[:, :rank], S[:rank], Q_right @ Vh[:rank].mT))


def _orthonormal(tests: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal columns over the span of tests, and the image of those."""
    Q, upper = torch.linalg.qr(tests)
    return Q, torch.linalg.solve_triangular(upper, image, upper=True, left=False)
