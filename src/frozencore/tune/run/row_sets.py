"""The rows of one run, as text and as tokens: for calibration, training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.run.record_parts import SourceRows
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.splits import ValidationSource
from frozencore.words import num_of


@dataclass(frozen=True)
class ScoredRows:
    """Rows to score a model on, as the task's examples (empty for own data) and as tokens."""

    examples: tuple[Example, ...]
    tokens: list[TokenRow]


@dataclass(frozen=True)
class Reading:
    """A summary of reading own rows.

    Attributes:
        read: The number of rows.
        columns: The columns that were read, such as ``("prompt", "completion")``.
        left_out: The number of unused rows, by reason.
        packed: The number of rows that training texts were packed into; None without packing.
        sources: Each of several sources; empty if there is one.
        held_out_from: The source of the held-out rows; None if they are a part of the read rows.
    """

    read: int
    columns: tuple[str, ...]
    left_out: Mapping[str, int]
    packed: int | None = None
    sources: tuple[SourceRows, ...] = ()
    held_out_from: str | None = None

    @property
    def in_words(self) -> str:
        columns = " and ".join(self.columns)
        why = ", ".join(f"{count:,} left out ({why})" for why, count in self.left_out.items())
        packed = "" if self.packed is None else f"; those to train on are packed to {self.packed:,}"
        said = f"Read {num_of(self.read, 'row')} by {columns}; {why or 'none left out'}{packed}."
        each = "; ".join(f"{one.source}: {one.drawn:,} of {num_of(one.read, 'row')}" for one in self.sources)
        other = "" if self.held_out_from is None else f" Held-out rows are those of {self.held_out_from}."
        return f"{said}{f' {each}.' if each else ''}{other}"


@dataclass(frozen=True)
class RunRows:
    """Rows of a task, or of the user's own file.

    Attributes:
        task, evaluation: None and empty for own data, which is scored by held-out loss alone.
        train, calibration, held_out: Token rows; calibration rows are drawn by the run's seed from the training rows,
            of ``calibration_task`` where one is named. The held-out ones are scored.
        validation_from: Where rows to validate on come from, whether or not they are used.
        validation: Those that choose among the steps of the training; None where nothing is to be chosen, or no row is
            left for it.
        num_cut, num_skipped: How many rows have a prompt that was cut, and how many were left out as too long; 0 where
            neither was allowed.
        reading: What came of the rows that were read; None for a task.
        exact_match: Whether completions of one's own rows are generated and compared.
        beta: Of DPO's loss on preferences; None where completions are learned.
        others: By task, plain texts of other tasks; their loss before and after tells what the run forgets.
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
    reading: Reading | None = None
    exact_match: bool = False
    beta: float | None = None
    others: Mapping[str, list[TokenRow]] = field(default_factory=dict)

    @property
    def scored(self) -> ScoredRows:
        """The rows that give the run's score."""
        return ScoredRows(self.evaluation, self.held_out)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each set of rows."""
        return self._fingerprints

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        sets = {"train": self.train, "calibration": self.calibration, "evaluation": self.held_out}
        if self.validation is not None:
            sets["validation"] = self.validation.tokens
        if self.others:
            sets["others"] = [row for rows in self.others.values() for row in rows]
        return {name: fingerprint_options({"rows": [vars(row) for row in rows]}) for name, rows in sets.items()}


Rows = TypeVar("Rows")
MOST_ROWS = 20_000  # about a hundred megabytes for the paper's tasks


class RowCache:
    """Keeps what it made; what was not asked for the longest goes first.

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
