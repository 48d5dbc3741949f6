"""How few rows stand for a task's: each split shrunk by one share, so that it is formed as in the real run.

Where the real run trains on all rows of the official split, so does the rehearsal; where rows are left over, some are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from frozencore.tune.run.config import RunConfig
from frozencore.tune.tasks import Split, Task
from frozencore.tune.tasks.splits import VALIDATION_SHARE

EVALUATED = 6
FEWEST_TRAINED = 4
MOST_EPOCHS = 2
STEPS = 2  # the fewest between which a step's time can be measured
TOKENS_OF_A_ROW = 8  # that the shortest rows have at least


@dataclass(frozen=True)
class Shares:
    """What share of the rows to train on, and of the rows to evaluate, a rehearsal has."""

    train: float
    evaluation: float

    def of(self, split: Split) -> float:
        """The share of an official split's rows."""
        return self.train if split == "train" else self.evaluation


@dataclass(frozen=True)
class Used:
    """The most rows that any run of a task trains on and evaluates, and the fewest that a rehearsal needs for it."""

    train: int
    evaluation: int
    needed: int

    def of(self, split: Split) -> int:
        """The rows that are taken of an official split."""
        return self.train if split == "train" else self.evaluation


def used_by(name: str, task: Task, configs: Sequence[RunConfig]) -> Used:
    """What some runs use of a task's rows, to learn them or to calibrate on them."""
    learning = [config for config in configs if config.task == name]
    calibrating = [config for config in configs if config.calibration_task == name]
    return Used(
        max((config.num_train or task.num_train for config in learning), default=task.num_train),
        max((config.num_evaluation or task.num_evaluation for config in learning), default=task.num_evaluation),
        max(
            FEWEST_TRAINED + 1,
            *(rows_to_train(task, config) for config in learning),
            *(fewest_calibrated(config) for config in calibrating),
        ),
    )


def together(used: Sequence[Used]) -> Used:
    """What tasks with the same rows use of them."""
    return Used(max(u.train for u in used), max(u.evaluation for u in used), max(u.needed for u in used))


def shares_of(used: Used, num_official: Mapping[Split, int]) -> Shares:
    """The shares that leave as many rows as a rehearsal needs."""
    trained, evaluated = (min(used.of(split), num_official[split]) for split in ("train", "evaluation"))
    return Shares(min(1.0, used.needed / max(1, trained)), min(1.0, EVALUATED / max(1, evaluated)))


def widest(shares: Sequence[Shares]) -> Shares:
    """The shares that leave each of several tasks with the same rows as many as it needs: one that trains on fewer than
    another needs a larger share of them."""
    return Shares(max(share.train for share in shares), max(share.evaluation for share in shares))


def rows_to_train(task: Task, config: RunConfig) -> int:
    """The fewest rows that make ``STEPS`` steps, and a calibration, when a tenth of them is held out for validation."""
    steps_an_epoch = math.ceil(STEPS / epochs_of(task, config))
    trained = max(FEWEST_TRAINED, fewest_calibrated(config), (steps_an_epoch - 1) * config.rows_a_step + 1)
    return next(n for n in count(trained) if n - max(1, round(VALIDATION_SHARE * n)) >= trained)


def fewest_calibrated(config: RunConfig) -> int:
    """Calibration examples that have a token for each direction of a basis."""
    return math.ceil(config.rank / TOKENS_OF_A_ROW)


def epochs_of(task: Task, config: RunConfig) -> int:
    """Epochs of a rehearsed run: as many as the real one's, but at most two."""
    return min(MOST_EPOCHS, config.epochs or task.epochs)


def scaled(num_rows: int, share: float) -> int:
    """A number of rows shrunk, at least one."""
    return max(1, round(num_rows * share))


def scaled_official(num_rows: int, used: int, share: float) -> int:
    """The rows of an official split: more than are used where the real one has more."""
    return max(scaled(num_rows, share), scaled(used, share) + 1) if num_rows > used else scaled(num_rows, share)
