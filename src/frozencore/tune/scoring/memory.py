"""Groups of rows that fit in memory: sized by a budget, and by half of it each time the device has no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from frozencore.device import fits
from frozencore.errors import ModelError
from frozencore.tune.rows.batches import group_rows
from frozencore.words import Progress


def score_in_groups(
    score: Callable[[list[int]], None],
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Call ``score`` with the indices of every row, in groups; a group that ran out of memory comes again, smaller.

    Args:
        score: Must leave nothing behind when it raises: its group is scored again.
        sizes, tokens_per_batch: As for :func:`frozencore.tune.rows.batches.group_rows`.

    Raises:
        ModelError: A single row does not fit.
    """
    pending = list(range(len(sizes)))
    shrink = 1
    while pending:
        groups = group_rows([sizes[i] for i in pending], device, tokens_per_batch, shrink=shrink)
        done: set[int] = set()
        for group in groups:
            rows = [pending[i] for i in group]
            if not fits(partial(score, rows)):
                if len(rows) == 1:
                    raise ModelError(
                        f"One row of {sizes[rows[0]][0]} tokens does not fit in the memory of {device}. "
                        f"Use --dtype bfloat16, a smaller --max-length with --truncate, or another --device."
                    )
                shrink *= 2
                break
            done.update(rows)
            if progress is not None:
                progress("score", len(sizes) - len(pending) + len(done), len(sizes), _note(shrink))
        pending = [i for i in pending if i not in done]


def _note(shrink: int) -> str:
    return "" if shrink == 1 else f"out of memory: 1/{shrink} of the batch"
