"""Sums over tokens of vectors and of their products, in float32 or wider.

Shapes: N counted tokens, p and q features.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
BLOCKS = 4  # of rows of a product on the CPU, one at a time
MANY = 128  # tokens; the product of fewer takes less time in float32


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
    total = torch.zeros(left.shape[1], right.shape[1], dtype=sum_dtype(left), device=left.device)
    add_outer(total, left, right)
    return total


def add_outer(total: Float[Tensor, "p q"], left: Float[Tensor, "N p"], right: Float[Tensor, "N q"]) -> None:
    """``total += leftᵀ right`` in place."""
    if left.is_cuda and left.dtype == right.dtype and left.dtype in HALF:
        torch.addmm(total, left.mT, right, out_dtype=torch.float32, out=total)
        return
    of_bfloat16 = left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cpu"
    splits = of_bfloat16 and len(left) >= MANY and _splits()
    if left is right or splits:
        _add_blocks(total, left, right, splits=splits)
    else:
        total.addmm_(left.mT.to(total.dtype), right.to(total.dtype))


def _add_blocks(
    total: Float[Tensor, "p q"], left: Float[Tensor, "N p"], right: Float[Tensor, "N q"], *, splits: bool
) -> None:
    """``total += leftᵀ right``, of a matrix with itself in five eighths of the products: the rest is a copy.

    Args:
        splits: Multiply bfloat16 values twice: the product, rounded, and what rounding took from it.
    """
    is_gram, width = left is right, -(-len(total) // BLOCKS)
    if not splits:
        left, right = left.to(total.dtype), right.to(total.dtype)
    for first in range(0, len(total), width):
        end, start = first + width, first if is_gram else 0
        rows, columns = left[:, first:end].mT, right[:, start:]
        product = rows @ columns
        for part in (product, torch.addmm(product, rows, columns, beta=-1)) if splits else (product,):
            total[first:end, start:] += part
            if is_gram:
                total[end:, first:end] += part[:, width:].mT


@cache
def _splits() -> bool:
    """Whether this CPU multiplies bfloat16 fast, and sums products and what is added to them in float32."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return False
    values = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, exact = torch.zeros(64, 64), values.double().mT @ values.double()
    _add_blocks(found, values, values.clone(), splits=True)
    return float((found - exact).abs().max()) < 1e-4 * float(exact.abs().max())


def finite(values: Tensor) -> Bool[Tensor, ""]:
    """Return whether the sum of the values is finite, as a tensor on their device."""
    return values.sum(dtype=sum_dtype(values)).isfinite()
