"""The steps of a private training as a data loader: the drawn rows of each step, cut into its forward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

DrawRows = Callable[[int], list[int]]
"""Gives the indices of the rows of a step."""


@dataclass(frozen=True)
class Pass:
    """One forward pass of a step.

    Attributes:
        step: Counted from 0.
        num_drawn: Rows of the whole step.
        rows: Rows of this pass; there may be none.
    """

    step: int
    num_drawn: int
    rows: list[Any]


class Passes(Sampler[list[tuple[int, int]]]):
    """The numbers (step, pass) of an epoch, each as a batch of its own."""

    def __init__(self, steps_an_epoch: int, passes: int) -> None:
        self.steps_an_epoch, self.passes, self.epoch = steps_an_epoch, passes, 0

    def __len__(self) -> int:
        return self.steps_an_epoch * self.passes

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        begin = self.epoch * self.steps_an_epoch
        for step in range(begin, begin + self.steps_an_epoch):
            for number in range(self.passes):
                yield [(step, number)]

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epoch = epoch


class DrawnRows(Dataset[Pass]):
    """The rows of a dataset as the passes of drawn steps."""

    def __init__(self, rows: Any, draw: DrawRows, passes: int) -> None:
        self.rows, self.draw, self.passes = rows, draw, passes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> Pass:
        step, number = key
        drawn = self.draw(step)
        size = math.ceil(len(drawn) / self.passes)
        return Pass(step, len(drawn), [self.rows[i] for i in drawn[number * size : (number + 1) * size]])


@dataclass(frozen=True)
class CollatedPass:
    """Makes of a pass what ``training_step`` gets: its step, how many rows are drawn, and its batch if it has rows."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, passes: Sequence[Pass]) -> dict[str, Any]:
        (one,) = passes
        return {
            "step": one.step,
            "num_drawn": one.num_drawn,
            "num_rows": len(one.rows),
            "batches": [self.collate(one.rows)] if one.rows else [],
        }


def drawn_loader(plain: Any, draw: DrawRows, steps_an_epoch: int, passes: int) -> DataLoader[Any]:
    """A loader of drawn steps, of the rows of a plain loader and with its collator."""
    return DataLoader(
        DrawnRows(plain.dataset, draw, passes),
        batch_sampler=Passes(steps_an_epoch, passes),
        collate_fn=CollatedPass(plain.collate_fn),
    )
