"""Which rows are evaluated, trained on and validated on.

Rows are drawn by a hash of their id, so a subset depends on the seed and the ids alone: not on the method, the run
seed, the order of the file or a library's random numbers. A row whose text is also evaluated is never trained on.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from frozencore.errors import ConfigError, DataError
from frozencore.lab.tasks.task import Example, Split, Task

SPLIT_SEED = 0
VALIDATION_SHARE = 0.1

ValidationSource = Literal["unused train rows", "official validation", "unused evaluation rows", "10% of train", "none"]


@dataclass(frozen=True)
class TaskSplits:
    """The rows of one task, disjoint as ids and as normalised text.

    Attributes:
        validation_from: Where the validation rows come from; ``"none"`` when there are none.
        num_leaked: Train rows set aside because their text is also an evaluation row.
    """

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    evaluation: tuple[Example, ...]
    validation_from: ValidationSource
    num_leaked: int


def split_task(
    task: Task,
    data_root: Path | None = None,
    *,
    num_train: int | None = None,
    num_evaluation: int | None = None,
    paper_steps: bool = False,
    seed: int = SPLIT_SEED,
) -> TaskSplits:
    """Draw a task's rows by the protocol.

    Validation rows are unused train rows; where all of train is used, the official validation split; where there
    is none, a tenth of train, which is then trained on no longer.

    Args:
        num_train, num_evaluation: Sizes other than the protocol's; a split that has fewer gives all it has.
        paper_steps: Train on all ``num_train`` rows even if none are left (the paper's step counts); validation
            then falls back to evaluation rows outside the evaluated subset, and to nothing.
        seed: Of the subsets. Results under different seeds are not comparable: leave it alone.

    Raises:
        ConfigError: A size is not positive.
        DataError: From the task's source, or no row is left to train or evaluate on.
    """
    num_train = task.num_train if num_train is None else num_train
    num_evaluation = task.num_evaluation if num_evaluation is None else num_evaluation
    _require_positive(num_train=num_train, num_evaluation=num_evaluation)

    official_evaluation = _draw(_examples(task, "evaluation", data_root), seed)
    evaluation, unevaluated = official_evaluation[:num_evaluation], official_evaluation[num_evaluation:]
    evaluated_texts = {normalised_text(example) for example in evaluation}

    official_train = _draw(_examples(task, "train", data_root), seed)
    usable = _without(official_train, evaluated_texts)
    train, unused = usable[:num_train], usable[num_train:]
    if not train or not evaluation:
        raise DataError(
            f"Task {task.name!r} needs rows to train and to evaluate on, but has {len(train)} and {len(evaluation)} "
            f"({len(official_train) - len(usable)} train rows are also evaluation rows)."
        )

    seen_texts = evaluated_texts | {normalised_text(example) for example in train}
    validation = _without(unused, seen_texts)[:num_evaluation]
    source: ValidationSource = "unused train rows"
    if not validation:
        official = _draw(_examples(task, "validation", data_root), seed)
        validation, source = _without(official, seen_texts)[:num_evaluation], "official validation"
    if not validation and paper_steps:
        validation, source = _without(unevaluated, seen_texts)[:num_evaluation], "unused evaluation rows"
    elif not validation:
        held_out = max(1, round(VALIDATION_SHARE * len(train)))
        validation, train, source = train[:held_out], train[held_out:], "10% of train"

    return TaskSplits(
        train=tuple(train),
        validation=tuple(validation),
        evaluation=tuple(evaluation),
        validation_from=source if validation else "none",
        num_leaked=len(official_train) - len(usable),
    )


def evaluation_rows(
    task: Task, data_root: Path | None = None, *, num_evaluation: int | None = None, seed: int = SPLIT_SEED
) -> tuple[Example, ...]:
    """The rows that :func:`split_task` evaluates, without reading the training split.

    Raises:
        ConfigError: ``num_evaluation`` is not positive.
        DataError: From the task's source, or it has no evaluation rows.
    """
    num_evaluation = task.num_evaluation if num_evaluation is None else num_evaluation
    _require_positive(num_evaluation=num_evaluation)
    drawn = _draw(_examples(task, "evaluation", data_root), seed)
    if not drawn:
        raise DataError(f"Task {task.name!r} needs rows to evaluate on, but has none.")
    return tuple(drawn[:num_evaluation])


def calibration_rows(train: Sequence[Example], num_rows: int, *, seed: int = SPLIT_SEED) -> tuple[Example, ...]:
    """Draw calibration rows from the training rows; all of them when there are fewer than asked for."""
    return tuple(_draw(train, seed + 1)[:num_rows])


def normalised_text(example: Example) -> str:
    """Prompt, or plain text, and choices: equal for rows that read the same."""
    return normalised("\n".join((example.prompt or example.completion, *example.choices)))


def normalised(text: str) -> str:
    """A text without case, punctuation and spacing."""
    return re.sub(r"\W+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def _require_positive(**counts: int) -> None:
    if min(counts.values()) < 1:
        came = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise ConfigError(f"Row counts must be positive, got {came}.")


def _examples(task: Task, split: Split, data_root: Path | None) -> list[Example]:
    rows = task.source.rows(split, data_root)
    return [task.to_example(row, f"{split}-{index}") for index, row in enumerate(rows)]


def _draw(examples: Sequence[Example], seed: int) -> list[Example]:
    def rank(example: Example) -> bytes:
        return hashlib.sha256(f"{seed}:{example.id}".encode()).digest()

    return sorted(examples, key=rank)


def _without(examples: Sequence[Example], texts: set[str]) -> list[Example]:
    return [example for example in examples if normalised_text(example) not in texts]
