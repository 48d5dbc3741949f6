"""Text on one line, sizes, times and names for users."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from unicodedata import category

HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # a text may have one alone, which no UTF-8 has
_LAYOUT = re.compile(r"(?:\r\n|[\n\t]|[^\S\r\v\f\x1c-\x1f\x85\u2028\u2029])+")


def one_line(text: object, longest: int | None = None) -> str:
    """``str(text)`` on one line: white space becomes one space, and invisible characters are escaped.

    A lone carriage return, a terminal's escape sequence, a mark of writing direction and half a surrogate pair are
    shown as in Python: ``\\r``, ``\\x1b``, ``\\u202e``, ``\\ud800``.

    Args:
        longest: The most characters to keep; None keeps all.
    """
    return escaped(_LAYOUT.sub(" ", str(text)).strip(" "))[:longest]


def escaped(text: str) -> str:
    """A text whose invisible characters are shown as Python writes them; spaces and ends of lines stay."""
    if text.isprintable():
        return text
    visible = {c for c in text if c.isprintable() or c == "\n" or category(c) == "Zs"}
    return "".join(c if c in visible else c.encode("unicode_escape").decode() for c in text)


def bytes_in_words(num_bytes: float) -> str:
    """A rounded number of bytes: ``1.5 MB``, ``12.0 GB`` (a KB is 1000 bytes)."""
    unit, length = ("GB", 10**9) if num_bytes >= 10**9 else ("MB", 10**6) if num_bytes >= 10**6 else ("KB", 1000)
    return f"{num_bytes / length:.1f} {unit}"


def time_in_words(seconds: float) -> str:
    """A rounded time: ``90 s``, ``45 min``, ``3 h 05 min``, ``2 days 4 h``."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def natural_sort_key(name: str) -> list[str | int]:
    """A sort key of names that puts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def num_of(count: int, thing: str) -> str:
    """A count with its noun: ``1 run``, ``2 runs``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def flag_of(option: str) -> str:
    """The flag of an option: ``--learning-rate``."""
    return "--" + option.replace("_", "-")


def nearest_name(given: str, known: Iterable[str], *, similar: float = 0.6) -> str | None:
    """The known name most similar to a given name, by difflib's ratio; None if none is similar."""
    by_plain = {name.casefold(): name for name in known}
    nearest = get_close_matches(given.casefold(), list(by_plain), n=1, cutoff=similar)
    return by_plain[nearest[0]] if nearest else None


def unknown_name(kind: str, came: str, known: Iterable[str]) -> str:
    """The error text of an unknown name: ``There is no method 'fca'. Did you mean 'fcca'? Known: ...``."""
    names = list(known)
    nearest = nearest_name(came, names)
    guess = f"Did you mean {nearest!r}? " if nearest else ""
    return f"There is no {kind} {came!r}. {guess}Known: {', '.join(names)}."
