"""The rows of a batch: one a sequence, or several laid end to end in a sequence, whose positions begin anew at each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from frozencore.calibration.batches import num_examples_of
from frozencore.errors import DataError

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "seq_lengths")  # beside position_ids, for some kernels


@dataclass(frozen=True)
class EndToEnd:
    """Where rows lie that follow one another in the sequences of a batch.

    Attributes:
        row: The row of each token (tokens), the sequences one after the other; it rises.
        place: Where each token stands if the rows are stacked, each as long as the longest (tokens).
        num_rows: Rows of all sequences.
        longest: Tokens of the longest row.
    """

    row: Tensor
    place: Tensor
    num_rows: int
    longest: int

    @classmethod
    def of(cls, begins: Tensor) -> EndToEnd:
        """Rows by the tokens (sequences x tokens, bool) that they begin at."""
        row = begins.flatten().long().cumsum(0) - 1
        starts = begins.flatten().nonzero().squeeze(1)
        lengths = torch.diff(starts, append=starts.new_tensor([row.numel()]))
        longest = int(lengths.max())
        within = torch.arange(row.numel(), device=row.device) - starts[row]
        return cls(row, row * longest + within, len(starts), longest)

    def stacked(self, tokens: Tensor) -> Tensor:
        """Values of each token (tokens x r) as rows x longest x r, with zeros behind shorter rows."""
        whole = tokens.new_zeros(self.num_rows * self.longest, tokens.shape[1])
        return whole.index_copy_(0, self.place, tokens).view(self.num_rows, self.longest, -1)

    def laid(self, stacked: Tensor) -> Tensor:
        """The inverse of :meth:`stacked`."""
        return stacked.reshape(self.num_rows * self.longest, -1).index_select(0, self.place)

    def to(self, device: torch.device) -> EndToEnd:
        """The same on a device."""
        return EndToEnd(self.row.to(device), self.place.to(device), self.num_rows, self.longest)


def laid_rows(batch: Any) -> EndToEnd | None:
    """The rows that lie end to end in the sequences of a batch; None where each sequence is one row.

    Without an ``attention_mask``, transformers keeps rows apart where ``position_ids`` do not go on.

    Raises:
        DataError: The batch holds several rows a sequence, but does not say so by such positions.
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
            f"Rows that lie end to end are told apart by position_ids that begin anew at each, without an "
            f"attention_mask, but this batch has {what}{' beside them' if begins is not None else ''}. Use a collator "
            "that gives position_ids alone (DataCollatorWithFlattening), or pad the rows."
        )
    return EndToEnd.of(begins.expand(num_examples_of(batch), -1))
