"""How an unknown name is answered: what is known, and the nearest of it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(kind: str, came: str, known: Iterable[str]) -> str:
    """One line for an error: ``There is no method 'fca'. Did you mean 'fcca'? Known: ...``."""
    names = list(known)
    nearest = get_close_matches(came.lower(), names, n=1)
    guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
    return f"There is no {kind} {came!r}. {guess}Known: {', '.join(names)}."
