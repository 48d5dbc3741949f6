"""Tasks: rows of a data set seen as prompts, completions and choices, and how the answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from frozencore.tune.rows import Example, Row

Split = Literal["train", "validation", "evaluation"]
Scoring = Literal["choice", "exact_match", "text"]
"""By the likeliest choice, by a generated number, or (for plain text) by held-out loss only."""


@dataclass(frozen=True)
class Origin:
    """A description of the source of rows.

    Attributes:
        splits: The data set's own names of the existing splits.
    """

    name: str
    configuration: str
    splits: Mapping[Split, str]


class Source(Protocol):
    """The source of a task's rows: a hub data set, files, or a generator.

    ``rows`` returns an empty sequence for ``"validation"`` if there is no such split beside the evaluation rows.
    """

    @property
    def origin(self) -> Origin: ...

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Row]: ...


@dataclass(frozen=True)
class Task:
    """One task of the suite.

    Attributes:
        source: Gives the raw rows of a split.
        to_example: Turns one raw row and its id into an :class:`Example`; raises ``DataError`` on a bad row.
        num_train, num_evaluation, epochs: The protocol's sizes (paper, table "datasets").
        max_new_tokens: Length limit of a generated answer; unused for choices.
        label: Name in reports; None for ``name``.
        family: The paper's family of tasks, None for every other task.
    """

    name: str
    scoring: Scoring
    source: Source
    to_example: Callable[[Row, str], Example]
    num_train: int
    num_evaluation: int
    epochs: int
    licence: str
    max_new_tokens: int = 64
    label: str | None = None
    family: str | None = None
