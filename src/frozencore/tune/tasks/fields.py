"""Reading one field of a raw row, or saying which row and column is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frozencore.errors import DataError


def text_field(row: Mapping[str, Any], column: str, row_id: str) -> str:
    """The text in a column, without the white space around it.

    Raises:
        DataError: The column is absent, holds no text, or only white space.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"Row {row_id}: column {column!r} must hold text, but holds {_shown(row, column)}.")
    return value.strip()


def label_field(row: Mapping[str, Any], column: str, row_id: str, *, num_labels: int) -> int:
    """The class number in a column, ``0 <= label < num_labels``.

    Raises:
        DataError: The column is absent, or the row is unlabeled (the hub writes -1) or labeled out of range.
    """
    value = row.get(column)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_labels:
        raise DataError(
            f"Row {row_id}: column {column!r} must hold a label from 0 to {num_labels - 1}, "
            f"but holds {_shown(row, column)}."
        )
    return value


def texts_field(row: Mapping[str, Any], column: str, row_id: str) -> list[str]:
    """The texts in a list column, each without the white space around it.

    Raises:
        DataError: The column is absent, holds no list of two texts or more, or one of them is empty.
    """
    return _texts(row.get(column), column, row_id)


def position_of(row: Mapping[str, Any], column: str, labels: Sequence[str], row_id: str) -> int:
    """Where the label in a column stands among the labels; ``2`` and ``"2"`` are the same.

    Raises:
        DataError: The column is absent, the row is unlabeled, or its label is none of these.
    """
    label = str(row.get(column)).strip()
    if label not in labels:
        raise DataError(
            f"Row {row_id}: column {column!r} must hold one of {', '.join(labels)}, but holds {_shown(row, column)}."
        )
    return list(labels).index(label)


def keyed_options(row: Mapping[str, Any], row_id: str) -> tuple[list[str], int]:
    """The options of ``choices: {text, label}`` and the position of ``answerKey``.

    Raises:
        DataError: A column is absent or malformed, an option is empty, or the key is no label of the row.
    """
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise DataError(f"Row {row_id}: column 'choices' must hold text and label, but holds {_shown(row, 'choices')}.")
    options = _texts(choices.get("text"), "choices.text", row_id)
    labels = _texts(choices.get("label"), "choices.label", row_id)
    if len(options) != len(labels):
        raise DataError(f"Row {row_id}: column 'choices' has {len(options)} texts but {len(labels)} labels.")
    return options, position_of(row, "answerKey", labels, row_id)


def listed_question(question: str, options: Sequence[str]) -> str:
    """A question with its options listed; the answer that is scored after it is the text of an option.

    The paper's accuracies (ARC-Challenge: 83) are those of models that see the options; it does not print its prompts.
    """
    return "\n".join((f"Question: {question}", "Options:", *(f"- {option}" for option in options), "Answer:"))


def _texts(value: Any, column: str, row_id: str) -> list[str]:
    if (
        not isinstance(value, list | tuple)
        or len(value) < 2
        or not all(isinstance(text, str) and text.strip() for text in value)
    ):
        raise DataError(
            f"Row {row_id}: column {column!r} must hold two texts or more, none empty, but holds {value!r}."
        )
    return [text.strip() for text in value]


def _shown(row: Mapping[str, Any], column: str) -> str:
    return repr(row[column]) if column in row else f"nothing (the columns are {', '.join(row)})"
