"""The four forms of a row: columns, an example of a task, text, tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frozencore.errors import DataError

HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON may hold one alone, which no tokenizer takes
NOT_WRITTEN = "the chat template does not write"
CONTROL = "the control token"
"""How notes begin that name something of a row that was not changed."""
Row = Mapping[str, Any]
"""A row as read: values by column."""


@dataclass(frozen=True)
class Example:
    """One row of a task.

    Attributes:
        id: Stable name of the row within its task, such as ``"train-17"``.
        prompt: The text before the answer, without a chat template.
        completion: The right answer as training text. It includes its leading separator (a space), so that
            ``prompt + completion`` is the text for a plain language model.
        choices: All candidate completions, including the right one; empty for generated answers.
    """

    id: str
    prompt: str
    completion: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextRow:
    """A row as exact text.

    Attributes:
        choices: Texts that may follow the context, without an end.
        templated: Whether the chat template wrote the text, with its own start token.
        loss_spans: The spans of the completion with loss, as beginnings and ends; empty for all of it.
        num_answer_spans: The number of these spans that the last turn has.
        suffix: The text of the template after the completion. It has no loss and is not read. None if the completion
            has no end token of its own; then one is added.
        changed: What was changed in the row, or is not written of it, for a person.
    """

    id: str
    context: str
    completion: str
    choices: tuple[str, ...] = ()
    templated: bool = False
    loss_spans: tuple[tuple[int, int], ...] = ()
    num_answer_spans: int = 1
    suffix: str | None = None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenRow:
    """A row as tokens.

    Attributes:
        spans: The spans with loss, beginnings and ends counted from ``num_context``; empty for all tokens from there.
        overlap: The end of the text before the answer, if the first token of the answer holds it too; mostly empty.
        num_answer_spans: The number of these spans that the last turn has.
    """

    id: str
    input_ids: list[int]
    num_context: int
    spans: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    overlap: str = field(default="", kw_only=True)
    num_answer_spans: int = field(default=1, kw_only=True)

    @property
    def loss_spans(self) -> tuple[tuple[int, int], ...]:
        """The spans of tokens with loss, as beginnings and ends."""
        spans = self.spans or ((0, len(self.input_ids) - self.num_context),)
        return tuple((self.num_context + start, self.num_context + stop) for start, stop in spans)

    @property
    def answer_start(self) -> int:
        """The beginning of the last turn with loss, whose text is generated and compared."""
        return self.loss_spans[-self.num_answer_spans][0]

    @property
    def num_targets(self) -> int:
        """The number of tokens with loss that follow another token."""
        return sum(stop - max(1, start) for start, stop in self.loss_spans)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model reads."""
        return len(self.input_ids)

    @property
    def content(self) -> dict[str, Any]:
        """What a hash of rows covers: id, tokens and where the loss is, as JSON values by name."""
        turns = {"turns": self.spans} if self.spans else {}
        return {"id": self.id, "input_ids": self.input_ids, "num_context": self.num_context, **turns}


@dataclass(frozen=True)
class ChoiceTokens:
    """The tokens of a prompt and of each choice."""

    id: str
    context_ids: list[int]
    choice_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt with its longest choice."""
        return len(self.context_ids) + max(map(len, self.choice_ids))


def text_field(row: Row, column: str, row_id: str, *, or_number: bool = False) -> str:
    """The text in a column, without surrounding white space.

    Args:
        or_number: Accept a number too, as printed.

    Raises:
        DataError: The column is missing, or holds something else or only white space.
    """
    value = row.get(column)
    takes = (str, int, float) if or_number else (str,)
    is_one = isinstance(value, takes) and not isinstance(value, bool) and bool(str(value).strip())
    if not is_one or (isinstance(value, float) and not math.isfinite(value)):
        wanted = "text or a number" if or_number else "text"
        raise DataError(f"Row {row_id}: column {column!r} must hold {wanted}, but holds {_held(row, column)}.")
    if HALF_A_CHARACTER.search(str(value)):
        raise DataError(f"Row {row_id}: column {column!r} must hold text, but half a character of UTF-16 is in it.")
    return str(value).strip()


def texts_field(row: Row, column: str, row_id: str, *, within: str = "") -> list[str]:
    """The texts in a list column, each without surrounding white space.

    Args:
        within: The column whose mapping ``row`` is, for the error.

    Raises:
        DataError: The column is missing, is not a list of two texts or more, or one of them is empty.
    """
    given = row.get(column)
    texts = given if isinstance(given, list | tuple) else ()
    if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        name = f"{within}.{column}" if within else column
        raise DataError(f"Row {row_id}: column {name!r} must hold two texts or more, none empty, but holds {given!r}.")
    return [text.strip() for text in texts]


def position_of(row: Row, column: str, labels: Sequence[str], row_id: str, *, or_position: bool = False) -> int:
    """The index of a column's label among the labels; ``2`` and ``"2"`` are the same.

    Args:
        or_position: Accept the index itself too, from 0.

    Raises:
        DataError: The column is missing, the row is unlabeled, its label is not among the labels, or it can be read
            both as a label and as the index of another one.
    """
    value = row.get(column)
    label = "" if value is None or value != value else str(value).strip()  # NaN differs from itself
    positions = [str(i) for i in range(len(labels))] if or_position else []
    found = {i for names in (labels, positions) for i, name in enumerate(names) if name == label}
    if not found:
        wanted = ", ".join(labels) + (f", or a position from 0 to {len(labels) - 1}" if or_position else "")
        raise DataError(f"Row {row_id}: column {column!r} must hold one of {wanted}, but holds {_held(row, column)}.")
    if len(found) > 1:
        raise DataError(
            f"Row {row_id}: column {column!r} holds {_held(row, column)}, which may be the choice "
            f"{' or '.join(repr(labels[i]) for i in sorted(found))}. Write choices that differ from each other and "
            "from positions."
        )
    return found.pop()


def _held(row: Row, column: str) -> str:
    return repr(row[column]) if column in row else f"nothing (the columns are {', '.join(row)})"
