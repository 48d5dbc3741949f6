"""What a task is: rows of a data set seen as prompts, completions and choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Split = Literal["train", "validation", "evaluation"]
Scoring = Literal["choice", "exact_match", "text"]
"""By the likeliest choice, by a generated number, or by held-out loss alone: plain text has no answers."""


@dataclass(frozen=True)
class Example:
    """One row as a language model meets it.

    Attributes:
        id: Stable name of the row within its task, for instance ``"train-17"``.
        prompt: The text before the answer, without a chat template.
        completion: The right answer as training text. It carries its own leading separator (a space), so
            that ``prompt + completion`` is the text of a plain language model.
        choices: Every candidate completion, the right one included; empty for generated answers.
    """

    id: str
    prompt: str
    completion: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where rows come from, in words.

    Attributes:
        splits: What each split is called there; without those that do not exist.
    """

    name: str
    configuration: str
    splits: Mapping[Split, str]


class Source(Protocol):
    """Where a task's rows come from: a hub data set, a local folder of the same schema, or a generator.

    ``rows`` gives an empty sequence for ``"validation"`` where no such split exists beside the evaluation rows.
    """

    @property
    def origin(self) -> Origin: ...

    def rows(self, split: Split, data_root: Path | None) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Task:
    """One task of the suite.

    Attributes:
        source: Gives the raw rows of a split.
        to_example: Turns one raw row and its id into an :class:`Example`; raises ``DataError`` on a bad row.
        num_train, num_evaluation, epochs: The protocol's sizes (paper, table "datasets").
        max_new_tokens: Length limit of a generated answer; unused for choices.
    """

    name: str
    scoring: Scoring
    source: Source
    to_example: Callable[[Mapping[str, Any], str], Example]
    num_train: int
    num_evaluation: int
    epochs: int
    licence: str
    max_new_tokens: int = 64
