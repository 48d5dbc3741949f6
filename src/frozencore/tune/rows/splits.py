"""Draw rows by a hash of their ids: held-out rows and calibration rows.

So a subset depends only on the seed and the ids, not on the method, the file's order or a library's random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from frozencore.tune.rows.row import Row, TokenRow

SPLIT_SEED = 0
VALIDATION_SHARE, HELD_OUT_MOST = 0.1, 500
"""Without other held-out rows this share of the rows is held out, and at most so many rows."""

AnyRow = TypeVar("AnyRow", Row, TokenRow)


@dataclass(frozen=True)
class Splits(Generic[AnyRow]):
    """The rows of a run, disjoint as ids and as texts.

    Attributes:
        validation_from: The source of the validation rows, in words.
        left_out: The number of rows that are not used, by reason.
    """

    train: Sequence[AnyRow]
    validation: Sequence[AnyRow]
    evaluation: Sequence[AnyRow]
    validation_from: str = "none"
    left_out: Mapping[str, int] = field(default_factory=dict)


def calibration_rows(train: Sequence[AnyRow], num_rows: int, *, seed: int = SPLIT_SEED) -> list[AnyRow]:
    """Draw calibration rows from the training rows; all rows if there are fewer than ``num_rows``."""
    return sorted(train, key=lambda row: rank(row.id, seed + 1))[:num_rows]


def hold_out(
    rows: Sequence[AnyRow], texts: Mapping[str, str], num_held_out: int | None = None, *, seed: int = SPLIT_SEED
) -> tuple[list[AnyRow], list[AnyRow]]:
    """Split into training and held-out rows, in the order of their ids' hashes; equal texts stay in one part.

    More equal texts than are to be held out are trained on, unless there are no others.

    Args:
        texts: The text of each row by its id.
        num_held_out: By default a tenth of the rows, at most :data:`HELD_OUT_MOST`.
    """
    by_text: dict[str, list[AnyRow]] = {}
    for row in rows:
        by_text.setdefault(texts[row.id], []).append(row)
    groups = sorted(by_text.values(), key=lambda group: rank(group[0].id, seed))
    wanted = num_held_out or min(HELD_OUT_MOST, max(1, round(VALIDATION_SHARE * len(rows))))
    wanted = max(wanted, min(map(len, groups), default=0))
    train: list[AnyRow] = []
    held_out: list[AnyRow] = []
    for group in groups:
        (held_out if len(held_out) + len(group) <= wanted else train).extend(group)
    return train, held_out


def rank(row_id: str, seed: int) -> bytes:
    """The key by which rows are sorted to draw the first of them."""
    return hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
