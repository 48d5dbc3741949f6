"""The random numbers of private training, and its steps as a data loader.

The rows of a step follow from a secret and the number of the step. The noise also follows from the sum that it hides.
So a resumed training repeats its draws exactly, and never uses the noise of one sum for another. Whoever knows the
secret can remove the noise, so it comes from the system's randomness, never from the seed of a run.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


def new_secret() -> str:
    """Draw 256 bits from the system's randomness, as hexadecimal digits."""
    return secrets.token_hex(32)


def drawn_rows(secret: str, step: int, num_rows: int, rate: float) -> list[int]:
    """Indices of the rows of a step, in order; each row is drawn with probability ``rate``, independently."""
    return np.flatnonzero(_generator(secret, "rows", step).random(num_rows) < rate).tolist()


def noise_of(secret: str, step: int, total: Tensor) -> Tensor:
    """Independent standard normal numbers (k) for the sum (k) that they hide, float32, on the CPU.

    A training that is resumed with other rows or options has other sums. With the same noise, the difference of both
    trainings would be without noise.
    """
    generator = _generator(secret, "noise", step, total.cpu().numpy().tobytes())
    return torch.from_numpy(generator.standard_normal(len(total)).astype(np.float32))


def _generator(secret: str, purpose: str, step: int, content: bytes = b"") -> np.random.Generator:
    """A generator with a key of 128 bits; torch's generator on a CPU uses 32 bits of a seed, which can be guessed."""
    digest = hashlib.sha256(f"{secret} {purpose} {step} ".encode() + content).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


DrawRows = Callable[[int], list[int]]
"""Returns the indices of the rows of a step."""


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
    """Samples the numbers (step, pass) of an epoch, one a batch."""

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
        """Set the epoch; the Trainer calls this before each one."""
        self.epoch = epoch


class DrawnRows(Dataset[Pass]):
    """A dataset whose items are the passes of drawn steps, each with its rows."""

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
    """Collates a pass into the inputs of ``training_step``: the step, the number of rows, and a batch unless empty."""

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
    """Make a data loader of drawn steps from a plain loader, with its rows and collator."""
    return DataLoader(
        DrawnRows(plain.dataset, draw, passes),
        batch_sampler=Passes(steps_an_epoch, passes),
        collate_fn=CollatedPass(plain.collate_fn),
    )
