"""Predict the first steps of training from a zero core from moments (not in the paper).

Adam divides each entry of the gradient by the root of its second moment. One token's gradient of a core's entry (i, j)
is ``(Pᵀδ)_i (Qᵀx)_j``. Its mean is ``C = PᵀGQ``. If inputs and errors are independent, its second moment is
``(PᵀDP)_ii (QᵀAQ)_jj``. So entries move along

    R_ij = -C_ij / √((PᵀDP)_ii (QᵀAQ)_jj)

Unlike the minimum of the local objective, this direction is not largest where a basis sees almost no data.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.maths.basis import Basis


def first_step(
    G: Float[Tensor, "m n"], A: Float[Tensor, "n n"], D: Float[Tensor, "m m"], basis: Basis
) -> Float[Tensor, "r r"]:
    """Compute the direction R in float64, from products in the moments' own precision; 0 where the gradient is 0."""
    P, Q = basis.P.to(G.dtype), basis.Q.to(G.dtype)
    sizes = ((X * (second @ X)).sum(0).double().clamp_min(0) for X, second in ((P, D), (Q, A)))
    size = torch.outer(*sizes).sqrt()
    return torch.where(size > 0, -(P.mT @ G @ Q).double() / size, 0.0)


def of_length(cores: Mapping[str, Float[Tensor, "r r"]], length: float) -> dict[str, Float[Tensor, "r r"]]:
    """Scale the directions to a root mean square length over layers, so that cores of any ranks move equally far."""
    square = sum(float(R.square().sum()) for R in cores.values()) / max(1, len(cores))
    return {name: R * (length / square**0.5) if square else R for name, R in cores.items()}
