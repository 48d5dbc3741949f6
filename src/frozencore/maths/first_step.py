"""The first steps of training from a zero core, predicted from moments (not in the paper).

Adam divides each entry of the gradient by the root of its second moment. Of a core's entry (i, j) the gradient of one
token is ``(Pᵀδ)_i (Qᵀx)_j``: its mean is ``C = PᵀGQ``, and with inputs independent of errors its second moment is
``(PᵀDP)_ii (QᵀAQ)_jj``. So entries move along

    R_ij = -C_ij / √((PᵀDP)_ii (QᵀAQ)_jj)

which, unlike the minimum of the local objective, does not go furthest where a basis sees next to nothing.
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
    """The direction R, in float64, of products as precise as the moments; 0 where the gradient always was."""
    P, Q = basis.P.to(G.dtype), basis.Q.to(G.dtype)
    sizes = ((X * (second @ X)).sum(0).double().clamp_min(0) for X, second in ((P, D), (Q, A)))
    size = torch.outer(*sizes).sqrt()
    return torch.where(size > 0, -(P.mT @ G @ Q).double() / size, 0.0)


def of_length(cores: Mapping[str, Float[Tensor, "r r"]], length: float) -> dict[str, Float[Tensor, "r r"]]:
    """The same directions, as long as that in the root mean square over layers: cores of any ranks go equally far."""
    square = sum(float(R.square().sum()) for R in cores.values()) / max(1, len(cores))
    return {name: R * (length / square**0.5) if square else R for name, R in cores.items()}
