"""Token rows as padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frozencore.calibration.loss import IGNORED
from frozencore.tune.rows.prompts import TokenRow

LOGITS_BUDGET = 2**26  # values held at once: 256 MiB of float32


@dataclass(frozen=True)
class PaddingCollator:
    """Stacks token rows: ``input_ids``, ``attention_mask``, ``labels``, each (rows, longest row), padded right.

    Labels are -100 on prompts and padding, also where the padding token is the end token.
    """

    pad_id: int

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Tensor]:
        input_ids, attention_mask = pad([row.input_ids for row in rows], self.pad_id, side="right")
        labels = input_ids.masked_fill(attention_mask == 0, IGNORED)
        for i, row in enumerate(rows):
            labels[i, : row.num_context] = IGNORED
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def make_batches(rows: Sequence[TokenRow], *, pad_id: int, batch_size: int) -> list[dict[str, Tensor]]:
    """Consecutive rows as batches, in order; the last one may be smaller."""
    collate = PaddingCollator(pad_id)
    return [collate(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]


def pad(sequences: Sequence[Sequence[int]], pad_id: int, *, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Stack token sequences of different lengths: tokens and attention mask, int64, (sequences, longest)."""
    longest = max(len(ids) for ids in sequences)
    tokens = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, ids in enumerate(sequences):
        place = slice(longest - len(ids), longest) if side == "left" else slice(0, len(ids))
        tokens[i, place] = torch.tensor(ids, dtype=torch.long)
        mask[i, place] = 1
    return tokens, mask


def group_rows(
    sizes: Sequence[tuple[int, int]], device: torch.device, tokens_per_batch: int | None = None, *, shrink: int = 1
) -> list[list[int]]:
    """Indices of rows in groups whose padded size stays within a token budget and a logits budget.

    The largest rows come first, so that what does not fit in memory fails at once. A row beyond a budget is a group
    of its own.

    Args:
        sizes: Of each row, its tokens and the logits it asks for (scored positions times vocabulary).
        tokens_per_batch: ``None`` for what fills the device: a CPU gains nothing beyond its caches.
        shrink: Divides both budgets.
    """
    costs, most = row_costs(sizes, device, tokens_per_batch)
    room = most // shrink
    groups: list[list[int]] = []
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if groups and (len(groups[-1]) + 1) * costs[groups[-1][0]] <= room:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def row_costs(
    sizes: Sequence[tuple[int, int]], device: torch.device, tokens_per_batch: int | None = None
) -> tuple[list[int], int]:
    """What each row takes of a batch's tokens, its logits counted too, and how many tokens a batch has.

    Args:
        sizes, tokens_per_batch: As for :func:`group_rows`.
    """
    most = (1024 if device.type == "cpu" else 16384) if tokens_per_batch is None else tokens_per_batch
    return [max(tokens, -(-logits * most // LOGITS_BUDGET)) for tokens, logits in sizes], most
