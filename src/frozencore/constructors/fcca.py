"""FCCA: the SVD of the Fisher-whitened cross moment (paper, section 3.2 and Algorithm 1).

    T = D^-1/2 G A^-1/2 = U Σ Vᵀ,   P = qr(D^-1/2 U_r),   Q = qr(A^-1/2 V_r)

Shapes: G m x n, A n x n, D m x m (diagonal by default), r the rank.
"""

from __future__ import annotations

import torch

from frozencore.basis import Basis, Coordinates, basis_from_factors
from frozencore.linalg import SvdMethod, effective_rank, truncated_svd
from frozencore.moments import LayerMoments
from frozencore.whitening import Whitening


def fcca_basis(
    moments: LayerMoments,
    rank: int,
    *,
    whitening: Whitening | None = None,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = "auto",
    seed: int = 0,
) -> Basis:
    """Directions with the largest correlation between input and output error.

    Args:
        moments: Holds G and what ``whitening.needs()`` names.
        whitening: The metric of the truncation; both sides, diagonal, damping 1e-3 by default.

    Returns:
        A basis whose spectrum is Σ (every entry of T is an uncentred correlation). A layer without gradient gets a
        seeded random basis and effective rank 0.

    Raises:
        CalibrationError: A moment is missing or not finite, or a second moment is zero where G is not.
    """
    whitening = whitening or Whitening()
    G = moments.G
    rank = min(rank, *G.shape)
    if not G.any():
        return basis_from_factors(
            G[:, :0], G.mT[:, :0], rank=rank, spectrum=torch.zeros(rank), coordinates=coordinates, seed=seed
        )
    A_root, D_root = whitening.input_root(moments), whitening.output_root(moments)
    T = A_root(D_root(G).mT).mT
    U, S, V = truncated_svd(T, rank, method=svd_method, seed=seed)
    k = effective_rank(S)
    return basis_from_factors(
        D_root(U[:, :k].double()),
        A_root(V[:, :k].double()),
        rank=rank,
        spectrum=S,
        coordinates=coordinates,
        seed=seed,
    )
