"""Choose the rows for evaluation, training and validation.

Rows of a task are drawn by a hash of their id. So a subset depends only on the split seed and the ids, not on the
method, the run seed, the order of the file or a library's random numbers. A row whose text is also evaluated is never
trained on.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, Literal, TypeVar

from frozencore.errors import NoRowsError
from frozencore.tune.rows import Example, TextRow, TokenRow
from frozencore.tune.tasks import Split, Task

SPLIT_SEED = 0
VALIDATION_SHARE, HELD_OUT_MOST = 0.1, 500
"""The share of rows that is held out where there are no others, and the most rows of it."""

AnyRow = TypeVar("AnyRow", Example, TextRow, TokenRow)
ReadRow = TypeVar("ReadRow", Example, TextRow)
ValidationSource = Literal["unused train rows", "official validation", "10% of train", "none"]


@dataclass(frozen=True)
class Splits(Generic[ReadRow]):
    """The rows of a run, disjoint as ids and as normalised text; ``left_out`` counts unused rows by reason."""

    train: tuple[ReadRow, ...]
    validation: tuple[ReadRow, ...]
    evaluation: tuple[ReadRow, ...]
    validation_from: ValidationSource
    left_out: Mapping[str, int]


def split_task(
    task: Task,
    data_root: Path | None = None,
    *,
    num_train: int | None = None,
    num_evaluation: int | None = None,
    train_on_all: bool = False,
    seed: int = SPLIT_SEED,
) -> Splits[Example]:
    """Draw a task's rows by the protocol.

    Validation rows are unused training rows. If all training rows are used, they are the official validation split. If
    there is no such split, they are a tenth of the training rows, which is then not trained on.

    Args:
        num_train, num_evaluation: Sizes in place of the protocol's; a smaller split is used completely.
        train_on_all: Hold out no tenth: train on all ``num_train`` rows even if none are left for validation.
        seed: Seed of the subsets. Results of one seed of the subsets are paired row by row; those of two are not.

    Raises:
        DataError: The task's source is invalid.
        NoRowsError: No row is left for training or evaluation.
    """
    num_train, num_evaluation = num_train or task.num_train, num_evaluation or task.num_evaluation
    evaluation = evaluation_rows(task, data_root, num_evaluation=num_evaluation, seed=seed)
    evaluated_texts = set(map(normalised_text, evaluation))
    leaked: list[Example] = []
    usable = without(_drawn(task, "train", data_root, seed), evaluated_texts, leaked)
    train = list(islice(usable, num_train))
    if not train:
        raise NoRowsError(
            f"Task {task.name!r} needs rows to train on, but has none ({len(leaked)} train rows are also evaluation "
            "rows)."
        )
    seen_texts = evaluated_texts.union(map(normalised_text, train))
    source: ValidationSource = "unused train rows"
    validation = list(islice(without(usable, seen_texts), num_evaluation))
    if not validation:
        source = "official validation"
        validation = list(islice(without(_drawn(task, "validation", data_root, seed), seen_texts), num_evaluation))
    if not validation and not train_on_all and len(train) > 1:
        rest, held_out = hold_out(train, seed=seed)
        if rest:
            validation, train, source = held_out, rest, "10% of train"
    counted = {"also evaluation rows": len(leaked)} if leaked else {}
    return Splits(tuple(train), tuple(validation), evaluation, source if validation else "none", counted)


def evaluation_rows(
    task: Task, data_root: Path | None = None, *, num_evaluation: int | None = None, seed: int = SPLIT_SEED
) -> tuple[Example, ...]:
    """The rows that :func:`split_task` evaluates, without reading the training split; errors are the same."""
    drawn = tuple(islice(_drawn(task, "evaluation", data_root, seed), num_evaluation or task.num_evaluation))
    if not drawn:
        raise NoRowsError(f"Task {task.name!r} needs rows to evaluate on, but has none.")
    return drawn


def calibration_rows(train: Sequence[AnyRow], num_rows: int, *, seed: int = SPLIT_SEED) -> tuple[AnyRow, ...]:
    """Draw calibration rows from the training rows; all rows if there are fewer than ``num_rows``."""
    return tuple(sorted(train, key=lambda row: _rank(row.id, seed + 1))[:num_rows])


def hold_out(
    rows: Sequence[ReadRow], num_held_out: int | None = None, *, seed: int = SPLIT_SEED
) -> tuple[list[ReadRow], list[ReadRow]]:
    """Split into training and held-out rows, in the order of their ids' hashes; equal texts stay in one part.

    More equal texts than are to be held out are trained on, unless there are no others.

    Args:
        num_held_out: By default a tenth of the rows, at most :data:`HELD_OUT_MOST`.
    """
    by_text: dict[str, list[ReadRow]] = {}
    for row in rows:
        by_text.setdefault(normalised_text(row), []).append(row)
    groups = sorted(by_text.values(), key=lambda group: _rank(group[0].id, seed))
    wanted = num_held_out or min(HELD_OUT_MOST, max(1, round(VALIDATION_SHARE * len(rows))))
    wanted = max(wanted, min(map(len, groups), default=0))
    train: list[ReadRow] = []
    held_out: list[ReadRow] = []
    for group in groups:
        (held_out if len(held_out) + len(group) <= wanted else train).extend(group)
    return train, held_out


def normalised_text(row: Example | TextRow) -> str:
    """A normal form of a row's text, for finding rows with the same text: white space and composed characters (NFC).

    The text of an example is its prompt (of plain text its completion) and its choices.
    """
    if isinstance(row, Example):
        text = "\n".join((row.prompt or row.completion, *row.choices))
    else:
        text = row.context + row.completion
    return " ".join(unicodedata.normalize("NFC", text).split())


def _drawn(task: Task, split: Split, data_root: Path | None, seed: int) -> Iterator[Example]:
    """Yield the examples of a split in the order of their ids' hashes; rows are read lazily."""
    rows = task.source.rows(split, data_root)
    for index in sorted(range(len(rows)), key=lambda index: _rank(f"{split}-{index}", seed)):
        yield task.to_example(rows[index], f"{split}-{index}")


def _rank(row_id: str, seed: int) -> bytes:
    """The key by which rows are sorted to draw the first of them."""
    return hashlib.sha256(f"{seed}:{row_id}".encode()).digest()


def without(
    rows: Iterable[ReadRow], texts: Collection[str], passed_over: list[ReadRow] | None = None
) -> Iterator[ReadRow]:
    """Yield the rows whose text is not among ``texts``; add the others to ``passed_over``."""
    for row in rows:
        if normalised_text(row) not in texts:
            yield row
        elif passed_over is not None:
            passed_over.append(row)
