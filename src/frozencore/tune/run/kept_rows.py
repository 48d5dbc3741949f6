"""Rows that the runs of one process share: read, split and tokenised once, while there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Rows = TypeVar("Rows")
MOST_ROWS = 20_000  # of the paper's tasks, about a hundred megabytes


class KeptRows:
    """Keeps what it made; what was not asked for the longest goes first.

    Args:
        most_rows: Kept at once; more than that are made every time.
    """

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most_rows = most_rows
        self._kept: dict[Hashable, tuple[Any, int]] = {}

    def get(self, key: Hashable, make: Callable[[], Rows], count: Callable[[Rows], int]) -> Rows:
        """What ``make`` gave under this key, or gives now; ``count`` says how many rows that is."""
        found: Rows
        if key in self._kept:
            found, num_rows = self._kept.pop(key)
        else:
            found = make()
            num_rows = count(found)
        self._kept[key] = found, num_rows  # as the newest
        while sum(rows for _, rows in self._kept.values()) > self._most_rows:
            del self._kept[next(iter(self._kept))]
        return found
