"""Choose the rows for evaluation, training and validation.

Rows are drawn by a hash of their id. So a subset depends only on the split seed and the ids, not on the method, the run
seed, the order of the file or a library's random numbers. A row whose text is also evaluated is never trained on.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from frozencore.errors import ConfigError, NoRowsError
from frozencore.tune.rows import Example
from frozencore.tune.tasks import Split, Task

SPLIT_SEED = 0
VALIDATION_SHARE = 0.1

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
    left_out = {}
    if not validation and not train_on_all and len(train) > 1:
        held_out = max(1, round(VALIDATION_SHARE * len(train)))
        rest = list(_without(train[held_out:], set(map(normalised_text, train[:held_out]))))
        if rest:
            left_out["also validation rows"] = len(train) - held_out - len(rest)
            validation, train, source = train[:held_out], rest, "10% of train"
    left_out["also evaluation rows"] = len(leaked)
    counted = {why: count for why, count in left_out.items() if count}
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


def calibration_rows(train: Sequence[Example], num_rows: int, *, seed: int = SPLIT_SEED) -> tuple[Example, ...]:
    """Draw calibration rows from the training rows; all rows if there are fewer than ``num_rows``."""
    return tuple(sorted(train, key=lambda example: _rank(example.id, seed + 1))[:num_rows])


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
    for index in sorted(range(len(rows)), key=lambda index: _rank(f"{split}-{index}", seed)):
        yield task.to_example(rows[index], f"{split}-{index}")


def _rank(row_id: str, seed: int) -> bytes:
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
