"""A task: a data set whose rows become prompts, completions and choices, and the protocol by which rows are drawn.

Rows are drawn by a hash of their id. So a subset depends only on the split seed and the ids, not on the method, the run
seed, the order of the file or a library's random numbers. A row whose text is also evaluated is never trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from frozencore.errors import DataError, NoRowsError
from frozencore.tune.rows.forms import normal_form
from frozencore.tune.rows.row import RawRow, Row
from frozencore.tune.rows.sources import Scoring
from frozencore.tune.rows.splits import SPLIT_SEED, Splits, hold_out, rank

Split = Literal["train", "validation", "evaluation"]


@dataclass(frozen=True)
class Origin:
    """A description of the source of rows, with its own names of the splits that exist."""

    name: str
    configuration: str
    splits: Mapping[Split, str]


class TaskData(Protocol):
    """The data of a task: a hub data set, or files.

    ``rows`` returns an empty sequence for ``"validation"`` if there is no such split beside the evaluation rows.
    """

    @property
    def origin(self) -> Origin: ...

    def rows(self, split: Split, data_root: Path | None) -> Sequence[RawRow]: ...


@dataclass(frozen=True)
class Task:
    """One task, a :class:`frozencore.tune.rows.sources.Source`.

    Attributes:
        to_row: Turns one raw row and its id into a :class:`Row`; raises ``DataError`` on a bad row.
        num_train, num_evaluation, epochs: The protocol's sizes (paper, table "datasets").
        max_new_tokens: Length limit of a generated answer; unused for choices.
        label: Name in reports; None for ``name``.
        family: The paper's family of tasks, None for every other task.
    """

    name: str
    scoring: Scoring
    source: TaskData
    to_row: Callable[[RawRow, str], Row]
    num_train: int
    num_evaluation: int
    epochs: int
    licence: str
    max_new_tokens: int = 64
    label: str | None = None
    family: str | None = None

    def draw(
        self,
        data_root: Path | None = None,
        *,
        num_train: int | None = None,
        num_evaluation: int | None = None,
        train_on_all: bool = False,
        seed: int = SPLIT_SEED,
    ) -> Splits[Row]:
        """Draw the task's rows by the protocol.

        Validation rows are unused training rows. If all training rows are used, they are the official validation split.
        If there is no such split, they are a tenth of the training rows, which is then not trained on.

        Args:
            data_root: The folder of the data sets; None for the hub.
            num_train, num_evaluation: Sizes in place of the protocol's; a smaller split is used completely.
            train_on_all: Hold out no tenth: train on all ``num_train`` rows even if none are left for validation.
            seed: Seed of the subsets. Results of one seed of the subsets are paired row by row; those of two are not.

        Raises:
            DataError: The task's source is invalid.
            NoRowsError: No row is left for training or evaluation.
        """
        num_train, num_evaluation = num_train or self.num_train, num_evaluation or self.num_evaluation
        evaluation = self.draw_evaluation(data_root, num_evaluation=num_evaluation, seed=seed)
        evaluated = set(map(question_of, evaluation))
        leaked: list[Row] = []
        usable = _without(self._ranked("train", data_root, seed), evaluated, leaked)
        train = list(islice(usable, num_train))
        if not train:
            raise NoRowsError(
                f"Task {self.name!r} needs rows to train on, but has none ({len(leaked)} train rows are also "
                "evaluation rows)."
            )
        seen, source = evaluated.union(map(question_of, train)), "unused train rows"
        validation = list(islice(_without(usable, seen), num_evaluation))
        if not validation:
            source = "official validation"
            validation = list(islice(_without(self._ranked("validation", data_root, seed), seen), num_evaluation))
        if not validation and not train_on_all and len(train) > 1:
            rest, held_out = hold_out(train, {row.id: question_of(row) for row in train}, seed=seed)
            if rest:
                validation, train, source = held_out, rest, "10% of train"
        left_out = {"also evaluation rows": len(leaked)} if leaked else {}
        return Splits(train, validation, evaluation, source if validation else "none", left_out)

    def draw_evaluation(
        self, data_root: Path | None = None, *, num_evaluation: int | None = None, seed: int = SPLIT_SEED
    ) -> tuple[Row, ...]:
        """The rows that :meth:`draw` evaluates, without reading the training split; errors are the same."""
        found = tuple(islice(self._ranked("evaluation", data_root, seed), num_evaluation or self.num_evaluation))
        if not found:
            raise NoRowsError(f"Task {self.name!r} needs rows to evaluate on, but has none.")
        return found

    def _ranked(self, split: Split, data_root: Path | None, seed: int) -> Iterator[Row]:
        """Yield the rows of a split in the order of their ids' hashes; they are converted lazily."""
        rows = self.source.rows(split, data_root)
        for index in sorted(range(len(rows)), key=lambda index: rank(f"{split}-{index}", seed)):
            yield self.to_row(rows[index], f"{split}-{index}")


def question_of(row: Row) -> str:
    """What a row asks, in a normal form: its prompt (of plain text its completion) and its choices."""
    return normal_form("\n".join((row.prompt or row.completion, *row.choices)))


def _without(rows: Iterable[Row], texts: Collection[str], passed_over: list[Row] | None = None) -> Iterator[Row]:
    """Yield the rows whose question is not among ``texts``; add the others to ``passed_over``."""
    for row in rows:
        if question_of(row) not in texts:
            yield row
        elif passed_over is not None:
            passed_over.append(row)


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

    def rows(self, split: Split, data_root: Path | None) -> Sequence[RawRow]:
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
        from frozencore.tune.rows.dataset_splits import load_split  # the import takes a second

        way_out = f"The way out: --data-root DIR (a folder that holds {self.path}, of the same schema), or a network."
        rows = load_split(self.path, self.config, self.splits[split], folder=folder, way_out=way_out)
        if missing := [column for column in self.columns if column not in rows.column_names]:
            raise DataError(
                f"Data set {title} needs the columns {', '.join(self.columns)}, but its {self.splits[split]} split "
                f"lacks {', '.join(missing)} (it has {', '.join(rows.column_names)}). "
                f"Point --data-root at data of the hub's schema."
            )
        return rows
