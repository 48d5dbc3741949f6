"""Names as people read them: in what order, and what is said to one that is not known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


def counted(name: str) -> list[str | int]:
    """A key to sort by, in which layer 2 is before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def num_of(count: int, thing: str) -> str:
    """A count with what it counts: ``1 run``, ``2 runs``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def flag_of(option: str) -> str:
    """An option as it stands on the command line: ``--learning-rate``."""
    return "--" + option.replace("_", "-")


def nearest_name(came: str, known: Iterable[str]) -> str | None:
    """What was meant by a name that is not known; None if nothing is near."""
    by_plain = {name.casefold(): name for name in known}
    nearest = get_close_matches(came.casefold(), list(by_plain), n=1)
    return by_plain[nearest[0]] if nearest else None


def unknown_name(kind: str, came: str, known: Iterable[str]) -> str:
    """One line for an error: ``There is no method 'fca'. Did you mean 'fcca'? Known: ...``."""
    names = list(known)
    nearest = nearest_name(came, names)
    guess = f"Did you mean {nearest!r}? " if nearest else ""
    return f"There is no {kind} {came!r}. {guess}Known: {', '.join(names)}."
