"""Tasks: rows of a data set seen as prompts, completions and choices, and how the answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from frozencore.tune.rows import Example, Row

Split = Literal["train", "validation", "evaluation"]
Scoring = Literal["choice", "exact_match", "text"]
"""By the likeliest choice, by a generated number, or by held-out loss alone: plain text has no answers."""


@dataclass(frozen=True)
class Origin:
    """Where rows come from, in words.

    Attributes:
        splits: The data set's own name of each split; without splits that do not exist.
    """

    name: str
    configuration: str
    splits: Mapping[Split, str]


class Source(Protocol):
    """Where a task's rows come from: a hub data set, files, or a generator.

    ``rows`` gives an empty sequence for ``"validation"`` where no such split exists beside the evaluation rows.
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
