"""What training's first steps make of a zero core, as far as moments tell (not in the paper).

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
from frozencore.maths.objective import core_gradient


def first_step(
    G: Float[Tensor, "m n"], A: Float[Tensor, "n n"], D: Float[Tensor, "m m"], basis: Basis
) -> Float[Tensor, "r r"]:
    """The direction R, in float64; 0 where an entry's gradient never was anything else."""
    P, Q = basis.P.double(), basis.Q.double()
    size = ((P * (D.double() @ P)).sum(0)[:, None] * (Q * (A.double() @ Q)).sum(0)).clamp_min(0).sqrt()
    return torch.where(size > 0, -core_gradient(G, basis) / size, 0.0)


def of_length(cores: Mapping[str, Float[Tensor, "r r"]], length: float) -> dict[str, Float[Tensor, "r r"]]:
    """The same directions, as long as that in the root mean square over layers: cores of any ranks go equally far."""
    square = sum(float(R.square().sum()) for R in cores.values()) / max(1, len(cores))
    return {name: R * (length / square**0.5) if square else R for name, R in cores.items()}
