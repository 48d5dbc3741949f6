"""Reading one field of a raw row, or saying which row and column is wrong."""

from __future__ import annotations

from collections.abc import Mapping
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


def _shown(row: Mapping[str, Any], column: str) -> str:
    return repr(row[column]) if column in row else f"nothing (the columns are {', '.join(row)})"
