"""The forms of a row: the columns of a source, a prompt with its completion or a conversation, and tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frozencore.errors import DataError

NOT_WRITTEN = "the chat template does not write"
CONTROL = "the control token"
OTHER_PROMPT = "a chat's prompt ends with"
OTHER_ROLE = "the chat template does not name the role"
"""The beginnings of notes on a row whose text was not changed."""
RawRow = Mapping[str, Any]
"""A row as read: values by column."""


@dataclass(frozen=True)
class Row:
    """One row of a source: a prompt and its completion, a conversation, or a text (a completion without a prompt).

    Attributes:
        id: Stable name of the row within its source, such as ``"train-17"``.
        prompt: The text before the answer, without a chat template.
        completion: The right answer as training text. It includes its leading separator (a space), so that
            ``prompt + completion`` is the text for a plain language model.
        choices: All candidate completions, including the right one. Rows with choices are scored by likelihood.
        messages: A conversation in place of prompt and completion; it ends with the assistant's turn.
        num_completion: The number of messages at the end that are the completion.
        system: The system text before a prompt; plain prompts are written without it.
        tools: The tools that the assistant may call, in the chat template's form.

    Raises:
        DataError: The completion is not among the choices.
    """

    id: str
    prompt: str = ""
    completion: str = ""
    choices: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    num_completion: int = 1
    system: str = ""
    tools: Sequence[Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.choices and self.completion not in self.choices:
            raise DataError(
                f"Row {self.id}: the completion {self.completion!r} must be among its choices {self.choices}, but is "
                "not. Write it as one of them, white space included."
            )


@dataclass(frozen=True)
class ChoiceTokens:
    """The tokens of a prompt and of each choice, which have the end token only if one of them begins another.

    Attributes:
        labels: The choices as the row gives them, for predictions.
        right: The index of the right choice.
    """

    id: str
    context_ids: list[int]
    choice_ids: list[list[int]]
    labels: tuple[str, ...] = ()
    right: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt with its longest choice."""
        return len(self.context_ids) + max(map(len, self.choice_ids))

    @property
    def content(self) -> dict[str, Any]:
        """The values that a hash of choices covers, as JSON values by name."""
        return {"context_ids": self.context_ids, "choice_ids": self.choice_ids, "right": self.right}


@dataclass(frozen=True)
class TokenRow:
    """A row as tokens: calibration, training and scoring take nothing else.

    Attributes:
        spans: The spans with loss, beginnings and ends counted from ``num_context``; empty for all tokens from there.
        overlap: The characters before the answer that the first token of the answer covers too; mostly empty.
        num_answer_spans: The number of these spans that the last turn has.
        choices: The tokens of the row's choices; None for a row without choices.
        num_cut: The number of tokens that were cut from the beginning of its prompt, or from the end of a text.
        system: The system text that the conversation begins with, empty for none; None if it is no conversation.
        changed: Notes for the user on changes to the row, and on parts that the template does not write.
    """

    id: str
    input_ids: list[int]
    num_context: int
    spans: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)
    overlap: str = field(default="", kw_only=True)
    num_answer_spans: int = field(default=1, kw_only=True)
    choices: ChoiceTokens | None = field(default=None, kw_only=True)
    num_cut: int = field(default=0, kw_only=True)
    system: str | None = field(default=None, kw_only=True)
    changed: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def token_lists(self) -> list[list[int]]:
        """Its tokens, and those of its choices."""
        choices = [] if self.choices is None else [self.choices.context_ids, *self.choices.choice_ids]
        return [self.input_ids, *choices]

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
    def prompt_end(self) -> int:
        """The number of tokens before what is generated: up to the answer, or half of a row without a prompt."""
        return self.answer_start or max(1, len(self.input_ids) // 2)

    @property
    def num_targets(self) -> int:
        """The number of tokens with loss that follow another token."""
        return sum(stop - max(1, start) for start, stop in self.loss_spans)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model reads in training."""
        return len(self.input_ids)

    @property
    def longest(self) -> int:
        """The number of tokens with the longest of completion and choices."""
        return max(len(self.input_ids), self.choices.num_tokens if self.choices else 0)

    @property
    def content(self) -> dict[str, Any]:
        """The values that a hash of rows covers: id, tokens and spans with loss, as JSON values by name."""
        turns = {"turns": self.spans} if self.spans else {}
        return {"id": self.id, "input_ids": self.input_ids, "num_context": self.num_context, **turns}


def require_once(names: Iterable[str], kind: str) -> None:
    """Raise a ``ValueError`` for a name that appears twice: one of its values would be lost."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"the {kind} {twice[0]!r} is given twice")


def text_field(row: RawRow, column: str, row_id: str, *, or_number: bool = False) -> str:
    """The text in a column, without surrounding white space.

    Args:
        or_number: Accept a number too, as printed.

    Raises:
        DataError: The column is missing, is of another type, or has only white space.
    """
    value = row.get(column)
    takes = (str, int, float) if or_number else (str,)
    is_one = isinstance(value, takes) and not isinstance(value, bool) and bool(str(value).strip())
    if not is_one or (isinstance(value, float) and not math.isfinite(value)):
        wanted = "text or a number" if or_number else "text"
        way_out = ""
        if isinstance(value, int | float) and not or_number:
            way_out = " Write the name of the class, or the number in quotes."
        elif isinstance(value, bytes):
            way_out = " Write the column as strings: Parquet and Arrow keep texts and bytes apart."
        raise DataError(f"Row {row_id}: column {column!r} must hold {wanted}, but holds {held(row, column)}.{way_out}")
    return str(value).strip()


def texts_field(row: RawRow, column: str, row_id: str, *, within: str = "") -> list[str]:
    """The texts in a list column, with their white space.

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
    return list(texts)


def held(row: RawRow, column: str) -> str:
    """What a column holds, for an error."""
    return repr(row[column]) if column in row else f"nothing (the columns are {', '.join(row)})"
