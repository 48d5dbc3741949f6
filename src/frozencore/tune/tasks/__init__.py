"""Tasks: rows of a data set seen as prompts, completions and choices, and how the answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row
from frozencore.tune.rows.row_sources import load_split

Split = Literal["train", "validation", "evaluation"]
Scoring = Literal["choice", "exact_match", "completion", "text"]
"""By the likeliest choice, a generated number, a generated completion (of own rows), or held-out loss alone."""


@dataclass(frozen=True)
class Origin:
    """A description of the source of rows, with its own names of the splits that exist."""

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


@dataclass(frozen=True)
class HubDataset:
    """One configuration of a data set.

    Attributes:
        path: The hub id, ``org/name``; also the path below a data root.
        columns: The columns that every split must have.
        splits: The data set's own names. A validation split is labeled and neither for training nor for evaluation.
    """

    path: str
    columns: tuple[str, ...]
    splits: Mapping[Split, str] = field(hash=False)
    config: str | None = None

    @property
    def origin(self) -> Origin:
        """The hub id and its splits."""
        return Origin(self.path, self.config or "default", self.splits)

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Row]:
        """Every row of a split, in its official order; empty for a validation split that does not exist.

        Args:
            data_root: A folder that holds ``org/name``; ``None`` for the hub and its offline cache.

        Raises:
            DataError: The data cannot be loaded, lack a column, or are empty.
        """
        if split not in self.splits:
            return ()
        title = self.path + (f" ({self.config})" if self.config else "")
        folder = None if data_root is None else data_root / self.path
        if folder is not None and not folder.is_dir():
            raise DataError(
                f"Data set {title} must lie at {folder}, but there is no such folder. "
                f"Give the folder that holds {self.path} as --data-root, or leave it out to use the hub."
            )
        way_out = f"The way out: --data-root DIR (a folder that holds {self.path}, of the same schema), or a network."
        rows = load_split(self.path, self.config, self.splits[split], folder=folder, way_out=way_out)
        if missing := [column for column in self.columns if column not in rows.column_names]:
            raise DataError(
                f"Data set {title} needs the columns {', '.join(self.columns)}, but its {self.splits[split]} split "
                f"lacks {', '.join(missing)} (it has {', '.join(rows.column_names)}). "
                f"Point --data-root at data of the hub's schema."
            )
        return rows
