"""Packed rows: several rows end to end in a sequence, and the core's part ``s·P R_i Qᵀ x`` for the tokens x of row i.

The backward pass keeps only z = Qᵀ x, r values a token. The rows are stacked with padding only during one product, so
a long row beside short ones takes memory only briefly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.calibration.batches import num_examples_of
from frozencore.calibration.preserve import preserved
from frozencore.errors import DataError

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths")  # given beside position_ids for some kernels
_NEAR = 0.02  # relative to the largest logit: rounding differs by less, wrong positions by more


@dataclass(frozen=True)
class PackedRows:
    """The places of rows that follow one another in the sequences of a batch.

    Attributes:
        row: The row index of each token (tokens), ascending over all sequences.
        place: The index of each token in the stacked rows, each padded to the longest (tokens).
        num_rows: The number of rows in all sequences.
        longest: The number of tokens of the longest row.
    """

    row: Tensor
    place: Tensor
    num_rows: int
    longest: int

    @classmethod
    def of(cls, begins: Tensor) -> PackedRows:
        """Make rows from a mask of their first tokens (sequences x tokens, bool)."""
        row = begins.flatten().long().cumsum(0) - 1
        starts = begins.flatten().nonzero().squeeze(1)
        longest = int(torch.diff(starts, append=starts.new_tensor([row.numel()])).max())
        within = torch.arange(row.numel(), device=row.device) - starts[row]
        return cls(row, row * longest + within, len(starts), longest)

    def stacked(self, tokens: Tensor) -> Tensor:
        """Arrange the values of each token (tokens x r) as rows x longest x r, with zeros after shorter rows."""
        whole = tokens.new_zeros(self.num_rows * self.longest, tokens.shape[1])
        return whole.index_copy_(0, self.place, tokens).view(self.num_rows, self.longest, -1)

    def packed(self, stacked: Tensor) -> Tensor:
        """The inverse of :meth:`stacked`."""
        return stacked.reshape(self.num_rows * self.longest, -1).index_select(0, self.place)

    def to(self, device: torch.device) -> PackedRows:
        """Copy to a device."""
        return PackedRows(self.row.to(device), self.place.to(device), self.num_rows, self.longest)


def packed_rows(batch: Any) -> PackedRows | None:
    """The rows that are packed into the sequences of a batch; None if each sequence is one row.

    Without an ``attention_mask``, transformers separates rows where ``position_ids`` restart.
    """
    if not isinstance(batch, Mapping):
        return None
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    begins = None
    if isinstance(positions, Tensor) and positions.ndim == 2:
        goes_on = positions.diff(dim=1) == 1
        if isinstance(mask, Tensor) and mask.shape == positions.shape:
            goes_on |= (mask[:, 1:] == 0) | (mask[:, :-1] == 0)
        if not goes_on.all():
            begins = pad(~goes_on, (1, 0), value=True)
    told = [name for name in _BOUNDARIES if batch.get(name) is not None]
    masked = isinstance(mask, Tensor) and (mask.ndim != 2 or bool((mask > 1).any()))
    if begins is None and not told and not masked:
        return None
    if begins is None or mask is not None:
        what = "an attention_mask" if mask is not None else told[0]
        raise DataError(
            f"Packed rows are told apart by position_ids that begin anew at each row, without an attention_mask, but "
            f"this batch has {what}{' beside them' if begins is not None else ''}. Use a collator that gives "
            "position_ids alone (DataCollatorWithFlattening), or pad the rows."
        )
    return PackedRows.of(begins.expand(num_examples_of(batch), -1))


def keeps_rows_apart(model: nn.Module) -> bool:
    """Return whether a causal model computes rows joined end to end as if each came alone.

    The logits of a short row are compared after two other rows, after one, and alone.
    """
    one, another, last = ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [7, 6, 5, 4, 3, 2, 1])
    device = next(model.parameters()).device

    def logits(*rows: list[int]) -> Tensor:
        ids, places = ([list(chain.from_iterable(part))] for part in (rows, [range(len(row)) for row in rows]))
        inputs = {"input_ids": torch.tensor(ids, device=device), "position_ids": torch.tensor(places, device=device)}
        return model(**inputs, use_cache=False).logits[0, -len(last) :].float()

    with preserved(model), torch.no_grad():
        after_one, after_another, alone = logits(one, last), logits(another, last), logits(last)
    largest = float(alone.abs().max())
    same = torch.allclose(after_one, after_another, rtol=0.0, atol=1e-6 * largest)
    return same and float((after_one - alone).abs().max()) <= _NEAR * largest


def packed_core_output(x: Tensor, P: Tensor, Q: Tensor, R: Tensor, scale: float, rows: PackedRows) -> Tensor:
    """The core's part in the dtype of P, by autograd.

    Args:
        x: (sequences, tokens, n).
        R: rows x r x r, the core of each row.
    """
    tokens = x.shape[:-1].numel()
    if tokens != len(rows.row):
        raise ValueError(
            f"The packed rows have {len(rows.row)} tokens, but a layer got {tokens}. Pad the rows instead."
        )
    z = (x.reshape(tokens, -1) @ Q).to(R.dtype) * scale
    through: Any = _ThroughRows.apply(z, R, rows.to(x.device))
    return (through.to(P.dtype) @ P.mT).view(*x.shape[:-1], -1)


class _ThroughRows(torch.autograd.Function):
    """``z R_iᵀ`` for tokens z (tokens x r) of row i."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, R: Tensor, rows: PackedRows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(z, R)
        return rows.packed(rows.stacked(z) @ R.mT)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, R = ctx.saved_tensors
        stacked = ctx.rows.stacked(g)
        grad_z = ctx.rows.packed(stacked @ R) if ctx.needs_input_grad[0] else None
        grad_R = stacked.mT @ ctx.rows.stacked(z) if ctx.needs_input_grad[1] else None
        return grad_z, grad_R, None
