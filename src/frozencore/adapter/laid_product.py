"""The core's part of rows that lie end to end: ``s·P R_i Qᵀ x`` for the tokens x of row i.

Only z = Qᵀ x is kept for the backward pass, r values a token; the rows are stacked with padding while one product is
computed, so that a long row beside short ones costs memory for a moment alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frozencore.adapter.laid_rows import EndToEnd


def laid_core_output(x: Tensor, P: Tensor, Q: Tensor, R: Tensor, scale: float, laid: EndToEnd) -> Tensor:
    """The core's part in the dtype of P, by autograd.

    Args:
        x: (sequences, tokens, n).
        R: rows x r x r, the core of each row.

    Raises:
        ValueError: x has other tokens than the rows.
    """
    tokens = x.shape[:-1].numel()
    if tokens != len(laid.row):
        raise ValueError(
            f"Rows that lie end to end are {len(laid.row)} tokens, but a layer got {tokens}. Pad the rows instead."
        )
    z = (x.reshape(tokens, -1) @ Q).to(R.dtype) * scale
    through: Any = _ThroughRows.apply(z, R, laid.to(x.device))
    return (through.to(P.dtype) @ P.mT).view(*x.shape[:-1], -1)


class _ThroughRows(torch.autograd.Function):
    """``z R_iᵀ`` for tokens z (tokens x r) of row i."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, R: Tensor, laid: EndToEnd) -> Tensor:
        ctx.laid = laid
        ctx.save_for_backward(z, R)
        return laid.laid(laid.stacked(z) @ R.mT)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, R = ctx.saved_tensors
        laid: EndToEnd = ctx.laid
        stacked = laid.stacked(g)
        grad_z = laid.laid(stacked @ R) if ctx.needs_input_grad[0] else None
        grad_R = stacked.mT @ laid.stacked(z) if ctx.needs_input_grad[1] else None
        return grad_z, grad_R, None
