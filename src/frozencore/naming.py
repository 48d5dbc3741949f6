"""How an unknown name is answered: what is known, and the nearest of it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(kind: str, came: str, known: Iterable[str]) -> str:
    """One line for an error: ``There is no method 'fca'. Did you mean 'fcca'? Known: ...``."""
    names = list(known)
    by_plain = {name.casefold(): name for name in names}
    nearest = get_close_matches(came.casefold(), list(by_plain), n=1)
    guess = f"Did you mean {by_plain[nearest[0]]!r}? " if nearest else ""
    return f"There is no {kind} {came!r}. {guess}Known: {', '.join(names)}."
