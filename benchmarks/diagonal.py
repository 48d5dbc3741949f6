"""Diagonal cores: one U and V for all updates, and k values a tenant, as Compress-then-Serve's JD-Diag.

    min Σ_t ‖B_t A_t - U diag(σ_t) Vᵀ‖²    (arXiv 2407.00066)

U, V and all σ_t are solved for in turn, each exactly, from factors alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tenant_study import product_svd

SWEEPS = 30
RIDGE = 1e-6  # of the mean of a normal matrix's diagonal: columns may be alike


def diagonal(
    updates: Sequence[tuple[Tensor, Tensor]], rank: int, sweeps: int = SWEEPS
) -> tuple[Tensor, Tensor, Tensor]:
    """U (m x k), V (n x k) and σ (tenants x k) of updates B (m x r) and A (r x n).

    The start is the k largest singular pairs among those of the updates, each divided by its norm.
    """
    scaled = [(B / max(float(torch.linalg.matrix_norm(B @ A)), 1e-30), A) for B, A in updates]
    pairs = [product_svd(B, A) for B, A in scaled]
    best = torch.cat([S for _, S, _ in pairs]).topk(rank).indices
    U, V = (torch.cat([pair[side] for pair in pairs], dim=1)[:, best] for side in (0, 2))
    sigmas = values_for(scaled, U, V)
    for _ in range(sweeps):
        U = side_for(scaled, V, sigmas)
        V = side_for([(A.mT, B.mT) for B, A in scaled], U, sigmas)
        U, V = U / U.norm(dim=0).clamp_min(1e-30), V / V.norm(dim=0).clamp_min(1e-30)
        sigmas = values_for(scaled, U, V)
    return U, V, values_for(updates, U, V)


def values_for(updates: Sequence[tuple[Tensor, Tensor]], U: Tensor, V: Tensor) -> Tensor:
    """The best σ of each update."""
    wanted = torch.stack([((B.mT @ U) * (A @ V)).sum(0) for B, A in updates])
    return solved((U.mT @ U) * (V.mT @ V), wanted)


def side_for(updates: Sequence[tuple[Tensor, Tensor]], V: Tensor, sigmas: Tensor) -> Tensor:
    """The best U."""
    wanted = sum(B @ ((A @ V) * sigma) for (B, A), sigma in zip(updates, sigmas, strict=True))
    return solved((V.mT @ V) * (sigmas.mT @ sigmas), wanted)


def solved(normal: Tensor, wanted: Tensor) -> Tensor:
    """X of X N = W for a symmetric N."""
    ridge = RIDGE * normal.diagonal().mean() * torch.eye(len(normal), dtype=normal.dtype)
    return torch.linalg.solve(normal + ridge, wanted, left=False)
