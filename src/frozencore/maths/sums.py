"""Sums over tokens of vectors and of their products, in float32 or wider.

Shapes: N counted tokens, p and q features, k columns of a projection.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def select(values: Float[Tensor, "all p"], rows: Tensor | None) -> Float[Tensor, "N p"]:
    """Select the counted rows; None selects all."""
    return values if rows is None else values.index_select(0, rows.to(values.device))


def sum_dtype(values: Tensor) -> torch.dtype:
    """The dtype in which values are summed: a bfloat16 sum of 1000 ones is 256."""
    return torch.promote_types(values.dtype, torch.float32)


def square_sum(values: Float[Tensor, "N p"]) -> Float[Tensor, " p"]:
    """``Σ v⊙v`` over rows; values become float32 first, because a product in half precision would be rounded."""
    wide = values.to(sum_dtype(values))
    return torch.linalg.vecdot(wide, wide, dim=0)


def outer(left: Float[Tensor, "N p"], right: Float[Tensor, "N q"]) -> Float[Tensor, "p q"]:
    """``leftᵀ right`` with float32 accumulation."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALF:
        return torch.mm(left.mT, right, out_dtype=torch.float32)
    dtype = sum_dtype(left)
    return left.mT.to(dtype) @ right.to(dtype)


def add_outer(total: Float[Tensor, "p q"], left: Float[Tensor, "N p"], right: Float[Tensor, "N q"]) -> None:
    """``total += leftᵀ right`` in place."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALF:
        torch.addmm(total, left.mT, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.mT.to(total.dtype), right.to(total.dtype))


def projected(values: Float[Tensor, "N p"], projection: Float[Tensor, "p k"] | None) -> Tensor:
    """``values projection`` (N x k) in float32 or wider; a None projection returns the values."""
    if projection is None:
        return values
    return values.to(sum_dtype(values)) @ projection.to(values.device, sum_dtype(values))


def finite(values: Tensor) -> Bool[Tensor, ""]:
    """Return whether the sum of the values is finite, as a tensor on their device."""
    return values.sum(dtype=sum_dtype(values)).isfinite()
