"""Arrange token rows in padded batches, in groups that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from frozencore.calibration.batches import IGNORED, Batch
from frozencore.calibration.calibration_options import BATCH_SIZE
from frozencore.device import run_unless_oom
from frozencore.errors import ModelError
from frozencore.progress import Progress, no_progress
from frozencore.tune.rows.row import TokenRow

LOGITS_BUDGET = 2**26  # values held at once: 256 MiB of float32
CPU_TOKENS, GPU_TOKENS = 1024, 16384  # of a batch; on a CPU they fill the caches, because more is not faster


@dataclass(frozen=True)
class PaddingCollator:
    """Stack token rows: ``input_ids``, ``attention_mask``, ``labels``, each (rows, longest row), padded right.

    Labels are -100 on prompts and padding, even if the padding token is the end token.
    """

    pad_id: int

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Tensor]:
        input_ids, attention_mask = pad([row.input_ids for row in rows], self.pad_id, side="right")
        labels, _ = pad([labels_of(row) for row in rows], IGNORED, side="right")
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def labels_of(row: TokenRow) -> list[int]:
    """The row's tokens with loss, and -100 for the others."""
    labels = [IGNORED] * len(row.input_ids)
    for start, stop in row.loss_spans:
        labels[start:stop] = row.input_ids[start:stop]
    return labels


def make_batches(rows: Sequence[TokenRow], *, pad_id: int, batch_size: int) -> list[dict[str, Tensor]]:
    """Consecutive rows as batches, in order; the last one may be smaller."""
    collate = PaddingCollator(pad_id)
    return [collate(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]


def calibration_batches(rows: Iterable[TokenRow], pad_id: int, batch_size: int = BATCH_SIZE) -> list[Batch]:
    """Group the calibration rows into batches of similar length, to save padding."""
    by_length = sorted(rows, key=lambda row: len(row.input_ids))
    return list(make_batches(by_length, pad_id=pad_id, batch_size=batch_size))


def pad(sequences: Sequence[Sequence[int]], pad_id: int, *, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Stack token sequences of different lengths: tokens and attention mask, int64, (sequences, longest)."""
    tokens = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
    padded = pad_sequence(tokens, batch_first=True, padding_value=pad_id, padding_side=side)
    return padded, pad_sequence([torch.ones_like(ids) for ids in tokens], batch_first=True, padding_side=side)


def score_in_groups(
    score: Callable[[list[int]], None],
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    progress: Progress = no_progress,
) -> None:
    """Call ``score`` with the indices of all rows, in groups; a group that ran out of memory is split and repeated.

    Args:
        score: Must have no effect if it raises, because its group is scored again.
        sizes: See :func:`group_rows`.

    Raises:
        ModelError: A single row does not fit.
    """
    pending = list(range(len(sizes)))
    shrink = 1
    while pending:
        groups = group_rows([sizes[i] for i in pending], device, shrink=shrink)
        done: set[int] = set()
        for group in groups:
            rows = [pending[i] for i in group]
            if not run_unless_oom(partial(score, rows)):
                if len(rows) == 1:
                    raise ModelError(
                        f"One row of {sizes[rows[0]][0]} tokens does not fit in the memory of {device}. "
                        f"Use --dtype bfloat16, a smaller --max-length with --too-long cut, or another --device."
                    )
                shrink *= 2
                break
            done.update(rows)
            note = "" if shrink == 1 else f"out of memory: 1/{shrink} of the batch"
            progress("score", len(sizes) - len(pending) + len(done), len(sizes), note)
        pending = [i for i in pending if i not in done]


def group_rows(sizes: Sequence[tuple[int, int]], device: torch.device, *, shrink: int = 1) -> list[list[int]]:
    """Group row indices so that each group's padded size is within a token budget and a logits budget.

    The largest rows come first, so that too little memory shows at once. A row beyond a budget is a group of its own.

    Args:
        sizes: For each row, its tokens and its logits (scored positions times vocabulary).
        shrink: Divides both budgets.
    """
    costs, most = row_costs(sizes, device)
    budget = most // shrink
    groups: list[list[int]] = []
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if groups and (len(groups[-1]) + 1) * costs[groups[-1][0]] <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def row_costs(sizes: Sequence[tuple[int, int]], device: torch.device) -> tuple[list[int], int]:
    """The cost of each row (:func:`group_rows`) in tokens of a batch, with its logits; and the tokens of a batch."""
    most = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    return [max(tokens, -(-logits * most // LOGITS_BUDGET)) for tokens, logits in sizes], most
