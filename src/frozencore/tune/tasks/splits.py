"""Choose the rows for evaluation, training and validation.

Rows are drawn by a hash of their id. So a subset depends only on the split seed and the ids, not on the method, the run
seed, the order of the file or a library's random numbers. A row whose text is also evaluated is never trained on.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from frozencore.errors import ConfigError, NoRowsError
from frozencore.tune.rows import Example, TextRow, TokenRow
from frozencore.tune.tasks import Split, Task

SPLIT_SEED = 0
VALIDATION_SHARE, HELD_OUT_MOST = 0.1, 500
"""The share of rows that is held out where there are no others, and the most rows of it."""

AnyRow = TypeVar("AnyRow", Example, TextRow, TokenRow)
ValidationSource = Literal["unused train rows", "official validation", "10% of train", "none"]


@dataclass(frozen=True)
class TaskSplits:
    """The rows of one task, disjoint as ids and as normalised text; ``left_out`` counts training rows by reason."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    evaluation: tuple[Example, ...]
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
) -> TaskSplits:
    """Draw a task's rows by the protocol.

    Validation rows are unused training rows. If all training rows are used, they are the official validation split. If
    there is no such split, they are a tenth of the training rows, which is then not trained on.

    Args:
        num_train, num_evaluation: Sizes in place of the protocol's; a smaller split is used completely.
        train_on_all: Hold out no tenth: train on all ``num_train`` rows even if none are left for validation.
        seed: Seed of the subsets. Results of one seed of the subsets are paired row by row; those of two are not.

    Raises:
        ConfigError: A size is not positive.
        DataError: The task's source is invalid.
        NoRowsError: No row is left for training or evaluation.
    """
    num_train = task.num_train if num_train is None else num_train
    num_evaluation = task.num_evaluation if num_evaluation is None else num_evaluation
    _require_positive(num_train=num_train, num_evaluation=num_evaluation)
    evaluation = list(islice(_drawn(task, "evaluation", data_root, seed), num_evaluation))
    evaluated_texts = set(map(normalised_text, evaluation))
    leaked: list[Example] = []
    usable = _without(_drawn(task, "train", data_root, seed), evaluated_texts, passed_over=leaked)
    train = list(islice(usable, num_train))
    if not train or not evaluation:
        raise NoRowsError(
            f"Task {task.name!r} needs rows to train and to evaluate on, but has {len(train)} and {len(evaluation)} "
            f"({len(leaked)} train rows are also evaluation rows)."
        )
    seen_texts = evaluated_texts.union(map(normalised_text, train))
    source: ValidationSource = "unused train rows"
    validation = list(islice(_without(usable, seen_texts), num_evaluation))
    if not validation:
        source = "official validation"
        validation = list(islice(_without(_drawn(task, "validation", data_root, seed), seen_texts), num_evaluation))
    if not validation and not train_on_all and len(train) > 1:
        rest, held_out = hold_out(train, share_of(train), normalised_text, seed=seed)
        if rest:
            validation, train, source = held_out, rest, "10% of train"
    counted = {"also evaluation rows": len(leaked)} if leaked else {}
    return TaskSplits(tuple(train), tuple(validation), tuple(evaluation), source if validation else "none", counted)


def evaluation_rows(
    task: Task, data_root: Path | None = None, *, num_evaluation: int | None = None
) -> tuple[Example, ...]:
    """The rows that :func:`split_task` evaluates, without reading the training split; errors are the same."""
    num_evaluation = task.num_evaluation if num_evaluation is None else num_evaluation
    _require_positive(num_evaluation=num_evaluation)
    drawn = tuple(islice(_drawn(task, "evaluation", data_root, SPLIT_SEED), num_evaluation))
    if not drawn:
        raise NoRowsError(f"Task {task.name!r} needs rows to evaluate on, but has none.")
    return drawn


def calibration_rows(train: Sequence[AnyRow], num_rows: int, *, seed: int = SPLIT_SEED) -> tuple[AnyRow, ...]:
    """Draw calibration rows from the training rows; all rows if there are fewer than ``num_rows``."""
    return tuple(sorted(train, key=lambda row: rank(row.id, seed + 1))[:num_rows])


def share_of(rows: Sequence[Any]) -> int:
    """The number of rows to hold out."""
    return min(HELD_OUT_MOST, max(1, round(VALIDATION_SHARE * len(rows))))


def hold_out(
    rows: Sequence[AnyRow], num_held_out: int, text_of: Callable[[AnyRow], str], *, seed: int = SPLIT_SEED
) -> tuple[list[AnyRow], list[AnyRow]]:
    """Split into training and held-out rows, in the order of their ids' hashes; equal texts stay in one part.

    More equal texts than are to be held out are trained on, unless there are no others.
    """
    by_text: dict[str, list[AnyRow]] = {}
    for row in rows:
        by_text.setdefault(text_of(row), []).append(row)
    groups = sorted(by_text.values(), key=lambda group: rank(group[0].id, seed))
    num_held_out = max(num_held_out, min(map(len, groups), default=0))
    train: list[AnyRow] = []
    held_out: list[AnyRow] = []
    for group in groups:
        (held_out if len(held_out) + len(group) <= num_held_out else train).extend(group)
    return train, held_out


def normalised_text(example: Example) -> str:
    """A normal form of prompt (or plain text) and choices, for finding rows with the same text."""
    return normalised("\n".join((example.prompt or example.completion, *example.choices)))


def normalised(text: str) -> str:
    """A text with its white space and the composition of its characters (NFC) made uniform."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _require_positive(**counts: int) -> None:
    if min(counts.values()) < 1:
        came = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ConfigError(f"Row counts must be positive, got {came}.")


def _drawn(task: Task, split: Split, data_root: Path | None, seed: int) -> Iterator[Example]:
    """Yield the examples of a split in the order of their ids' hashes; rows are read lazily."""
    rows = task.source.rows(split, data_root)
    for index in sorted(range(len(rows)), key=lambda index: rank(f"{split}-{index}", seed)):
        yield task.to_example(rows[index], f"{split}-{index}")


def rank(row_id: str, seed: int) -> bytes:
    """The key by which rows are sorted to draw the first of them."""
    return hashlib.sha256(f"{seed}:{row_id}".encode()).digest()


def _without(
    examples: Iterable[Example], texts: set[str], *, passed_over: list[Example] | None = None
) -> Iterator[Example]:
    """Yield the examples whose text is not among ``texts``; add the others to ``passed_over``."""
    for example in examples:
        if normalised_text(example) not in texts:
            yield example
        elif passed_over is not None:
            passed_over.append(example)
