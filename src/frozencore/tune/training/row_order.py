"""The order of rows in processes that train together: each step is of the rows that one process would have in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Sampler

from frozencore.ranks import num_ranks
from frozencore.tune.rows import TokenRow

WITHOUT_LOSS = TokenRow("", [0], 1)
RowCollator = Callable[[Sequence[TokenRow]], dict[str, Any]]


def filled_up(rows: Sequence[TokenRow], multiple: int) -> list[TokenRow]:
    """The rows, and in a process group rows without a loss, so that all processes get as many batches."""
    missing = -len(rows) % multiple if num_ranks() > 1 else 0
    return [*rows, *[WITHOUT_LOSS] * missing]


def without_fillers(collate: RowCollator) -> RowCollator:
    """A collator that sees no row without a loss, but one where a process has no other."""
    return lambda rows: collate([row for row in rows if row is not WITHOUT_LOSS] or rows[:1])


class SharedOrder(Sampler[int]):
    """The order of one process, as accelerate draws it; the rows without a loss come last.

    accelerate deals its batches out in turn, so that together a step's are of the rows of one process's step.
    """

    def __init__(self, rows: Sequence[TokenRow], seed: int) -> None:
        self._num_rows = len(rows)
        self._of_loss = SeedableRandomSampler(range(sum(row is not WITHOUT_LOSS for row in rows)), data_seed=seed)

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[int]:
        num_of_loss = len(self._of_loss)
        yield from self._of_loss
        yield from range(num_of_loss, self._num_rows)

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self._of_loss.set_epoch(epoch)
