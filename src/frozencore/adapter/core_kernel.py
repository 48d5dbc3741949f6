"""``y += s·z Rᵀ Pᵀ`` in one kernel on a GPU, for 16-bit models.

Without it the sum takes two casts and two products, and a small batch waits for kernel launches.

Shapes: y tokens x m, z tokens x r, P m x r, R r x r; or R rows x r x r, a core for each row of the batch, with the
tokens of a row contiguous.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_core_kernel(  # type: ignore[no-untyped-def]  # pointers and numbers of triton
    y, z, R, P, scale, tokens_of_a_core, m, r,
    y_row, z_row, R_core, R_row, R_column, P_row, P_column,
    RANK: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute a block of TOKENS x FEATURES outputs of one core; RANK is r rounded up to a size of the matrix units."""
    within, which = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(2).to(tl.int64)
    tokens = which * tokens_of_a_core + within
    R += which * R_core
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    k = tl.arange(0, RANK)
    is_token, is_feature, is_k = within < tokens_of_a_core, features < m, k < r
    z_block = tl.load(z + tokens[:, None] * z_row + k[None, :], mask=is_token[:, None] & is_k[None, :], other=0.0)
    core = tl.load(R + k[None, :] * R_row + k[:, None] * R_column, mask=is_k[:, None] & is_k[None, :], other=0.0)  # Rᵀ
    turned = tl.dot(z_block.to(tl.float32), core, input_precision="ieee").to(z_block.dtype)
    p_block = tl.load(
        P + features[None, :] * P_row + k[:, None] * P_column, mask=is_k[:, None] & is_feature[None, :], other=0.0
    )  # Pᵀ
    places = y + tokens[:, None] * y_row + features[None, :]
    inside = is_token[:, None] & is_feature[None, :]
    before = tl.load(places, mask=inside, other=0.0)
    after = before.to(tl.float32) + scale * tl.dot(turned, p_block)
    tl.store(places, after.to(before.dtype), mask=inside)


def add_core_by_kernel(y: Tensor, z: Tensor, R: Tensor, P: Tensor, scale: float) -> Tensor:
    """``y += s·z Rᵀ Pᵀ``, rounded like the separate products: z Rᵀ in float32, then to the dtype of z."""
    num_tokens, m = y.shape
    num_cores, r = (len(R) if R.ndim == 3 else 1), z.shape[1]
    if num_tokens == 0:
        return y
    of_a_core = num_tokens // num_cores
    rank = max(16, triton.next_power_of_2(r))
    tokens = 16 if of_a_core <= 16 else 64
    features = 128 if rank <= 32 else 64
    grid: Any = (triton.cdiv(of_a_core, tokens), triton.cdiv(m, features), num_cores)
    with torch.cuda.device(y.device) if y.is_cuda else nullcontext():  # Triton launches on the current device
        _add_core_kernel[grid](
            y, z, R, P, float(scale), of_a_core, m, r, y.stride(0), z.stride(0),
            R.stride(0) if R.ndim == 3 else 0, *R.stride()[-2:], *P.stride(),
            RANK=rank, TOKENS=tokens, FEATURES=features,
        )  # fmt: skip
    return y
