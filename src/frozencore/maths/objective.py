"""The value of a basis before any training: the local Fisher objective of the paper (eq. 1, theorem 1).

    minimise over rank(ΔW) ≤ r   ⟨G, ΔW⟩ + 1/(2η) ‖D^1/2 ΔW A^1/2‖²_F

Letters: G (m x n) cross moment, A and D damped second moments, P (m x r) and Q (n x r) a basis, η the step, s the
adapter scale. A and D are given as vectors (diagonal) or matrices (dense).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.maths.basis import Basis


def local_objective(G: Float[Tensor, "m n"], A: Tensor, D: Tensor, delta_W: Float[Tensor, "m n"], step: float) -> float:
    """The value of the local objective at an update ``delta_W``; negative is an improvement."""
    linear = (G.double() * delta_W.double()).sum()
    metric = (delta_W.double() * _times(D, _times(A, delta_W.mT).mT)).sum()
    return float(linear + metric / (2 * step))


def core_gradient(G: Float[Tensor, "m n"], basis: Basis) -> Float[Tensor, "r r"]:
    """``PᵀGQ``, the gradient of a zero core, in float64; the product with G has G's own precision."""
    return (basis.P.to(G.dtype).mT @ G).double() @ basis.Q.double()


def projected_gradient_norm(G: Float[Tensor, "m n"], basis: Basis) -> float:
    """``‖PᵀGQ‖_F``: the gradient that reaches a zero core (paper, section 3.1)."""
    return float(core_gradient(G, basis).norm())


def whitened_core(core: Float[Tensor, "r r"], A: Tensor, D: Tensor, basis: Basis) -> Float[Tensor, "r r"]:
    """``(PᵀDP)^-1/2 C (QᵀAQ)^-1/2`` of a core's gradient C, up to a rotation on each side (Cholesky roots)."""
    P, Q = basis.P.double(), basis.Q.double()
    left = torch.linalg.cholesky(P.mT @ _times(D, P))
    right = torch.linalg.cholesky(Q.mT @ _times(A, Q))
    half = torch.linalg.solve_triangular(left, core, upper=False)
    return torch.linalg.solve_triangular(right, half.mT, upper=False).mT


def captured_correlation(G: Float[Tensor, "m n"], A: Tensor, D: Tensor, basis: Basis) -> float:
    """``J = ‖(PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2‖²_F``: the squared whitened gradient inside the span.

    It depends on the spans only, and no basis of rank r exceeds ``Σ_{i≤r} σ_i(T)²``, which FCCA reaches.
    """
    return float(whitened_core(core_gradient(G, basis), A, D, basis).square().sum())


def closed_form_core(
    G: Float[Tensor, "m n"], A: Tensor, D: Tensor, basis: Basis, *, step: float = 1.0, scale: float = 1.0
) -> Float[Tensor, "r r"]:
    """The core that minimises the local objective: ``R* = -(η/s) (PᵀDP)^-1 PᵀGQ (QᵀAQ)^-1``."""
    P, Q = basis.P.double(), basis.Q.double()
    half = torch.linalg.solve(P.mT @ _times(D, P), core_gradient(G, basis))
    return -(step / scale) * torch.linalg.solve(Q.mT @ _times(A, Q), half.mT).mT


def coherence(X: Float[Tensor, "m r"]) -> float:
    """The largest leverage score of an orthonormal basis's rows over the mean ``r/m``; 1 means evenly spread."""
    num_rows, rank = X.shape
    return float(X.double().square().sum(1).max()) * num_rows / rank


def _times(second_moment: Tensor, X: Tensor) -> Tensor:
    moment, X = second_moment.double(), X.double()
    return moment[:, None] * X if moment.ndim == 1 else moment @ X
