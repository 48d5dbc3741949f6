"""Find the leading singular triples of a matrix T from one pass of products with known directions U and V.

Y = T V (m x k),   Z = Tᵀ U (n x k),   U and V with orthonormal columns,   C = Uᵀ T V

    T = U C Vᵀ + A Vᵀ + U Bᵀ + E,   A = (I - UUᵀ) Y,   B = (I - VVᵀ) Z

E, outside both spans, was not observed. It would be ``A C⁺ Bᵀ`` if T had the rank of C. The small singular values of C
dominate this estimate, so it needs a large ridge. On sums of gradients of a real training (docs/refreshing.md), with U
and V from the previous round, a ridge of half the largest singular value of C was best among 0.1 to 1, and better than
E = 0. Random U and V do not find the leading directions of such spectra, with any estimate of E.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.maths.linalg import TruncatedSVD, canonical_signs

RIDGE = 0.5  # times the largest singular value of C

Product = tuple[Float[Tensor, "m j"], Float[Tensor, "n j"]]
"""L and R of a matrix ``L Rᵀ``."""


def from_one_pass(
    Y: Float[Tensor, "m k"], Z: Float[Tensor, "n k"], U: Float[Tensor, "m k"], V: Float[Tensor, "n k"]
) -> Product:
    """Estimate T as ``L Rᵀ``, with L m x 2k and R n x 2k.

    Args:
        U, V: Have full column rank; they need not be orthonormal.
    """
    U, Z = _orthonormal(U, Z)
    V, Y = _orthonormal(V, Y)
    C = U.mT @ Y
    A, B = Y - U @ C, Z - V @ C.mT
    left, S, right = torch.linalg.svd(C)
    inverse = (right.mT * (S / (S**2 + (RIDGE * S[:1]) ** 2).clamp_min(torch.finfo(S.dtype).tiny))) @ left.mT
    return torch.cat([U @ C + A, U + A @ inverse], dim=1), torch.cat([V, B], dim=1)


def svd_of_product(product: Product, rank: int) -> TruncatedSVD:
    """Find the ``rank`` leading singular triples of ``L Rᵀ``, with canonical signs, without an m x n matrix."""
    (Q_left, left), (Q_right, right) = (torch.linalg.qr(factor) for factor in product)
    U, S, Vh = torch.linalg.svd(left @ right.mT)
    return TruncatedSVD(*canonical_signs(Q_left @ U[:, :rank], S[:rank], Q_right @ Vh[:rank].mT))


def _orthonormal(tests: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal columns over the span of the tests, and their image."""
    Q, upper = torch.linalg.qr(tests)
    return Q, torch.linalg.solve_triangular(upper, image, upper=True, left=False)
