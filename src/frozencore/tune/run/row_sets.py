"""The rows of one run, as text and as tokens: for calibration, training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.run.record_parts import ReadRows
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.splits import ValidationSource


@dataclass(frozen=True)
class ScoredRows:
    """Rows to score a model on, as the task's examples (empty for own data) and as tokens."""

    examples: tuple[Example, ...]
    tokens: list[TokenRow]


@dataclass(frozen=True)
class RunRows:
    """Rows of a task, or of the user's own file.

    Attributes:
        task, evaluation: None and empty for own data, which is scored by held-out loss alone.
        train, calibration, held_out: Token rows. Calibration rows are drawn by the run's seed from the training rows,
            or from those of ``calibration_task``. The held-out rows are scored.
        validation_from: The source of validation rows, also if they are not used.
        validation: The rows that choose a step; None if no step is chosen or no row is left.
        num_cut, num_skipped: The number of rows with a cut prompt, and of rows left out as too long; 0 if the
            configuration does not allow it.
        reading: A summary of reading own rows; None for a task.
        exact_match: Whether completions of own rows are generated and compared.
        others: Plain texts of other tasks by task; their loss before and after training shows what the run forgets.
    """

    task: Task | None
    evaluation: tuple[Example, ...]
    train: list[TokenRow]
    calibration: list[TokenRow]
    held_out: list[TokenRow]
    validation_from: ValidationSource
    validation: ScoredRows | None = None
    num_cut: int = 0
    num_skipped: int = 0
    reading: ReadRows | None = None
    exact_match: bool = False
    others: Mapping[str, list[TokenRow]] = field(default_factory=dict)

    @property
    def scored(self) -> ScoredRows:
        """The rows that give the run's score."""
        return ScoredRows(self.evaluation, self.held_out)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each set of rows."""
        sets = {"train": self.train, "calibration": self.calibration, "evaluation": self.held_out}
        if self.validation is not None:
            sets["validation"] = self.validation.tokens
        if self.others:
            sets["others"] = [row for rows in self.others.values() for row in rows]
        return {name: fingerprint_options({"rows": [vars(row) for row in rows]}) for name, rows in sets.items()}


Rows = TypeVar("Rows")
MOST_ROWS = 20_000  # about a hundred megabytes for the paper's tasks


class RowCache:
    """Rows by key; the rows that were not used for the longest time are dropped first.

    Args:
        most_rows: The most rows to keep; a larger set is never kept.
    """

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._kept: dict[Hashable, tuple[Any, int]] = {}

    def get(self, key: Hashable, make: Callable[[], Rows], count: Callable[[Rows], int]) -> Rows:
        """Return the rows under this key, or make and keep them; ``count`` gives their number."""
        found: Rows
        if key in self._kept:
            found, num_rows = self._kept.pop(key)
        else:
            found = make()
            num_rows = count(found)
        self._kept[key] = found, num_rows  # as the newest
        while sum(rows for _, rows in self._kept.values()) > self._most_rows:
            del self._kept[next(iter(self._kept))]
        return found
