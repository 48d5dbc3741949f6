"""Any text on one line that shows every character: of an error, a file, a name that someone chose."""

from __future__ import annotations

import re

_LAYOUT = re.compile(r"(?:\r\n|[\n\t]|[^\S\r\v\f\x1c-\x1f\x85\u2028\u2029])+")


def one_line(text: object, longest: int | None = None) -> str:
    """``str(text)`` in which layout (spaces, tabs, line ends) is one space, and what no screen shows is escaped.

    A lone carriage return, an escape sequence of a terminal, a mark that turns the direction of writing and half a
    surrogate pair stand there as Python writes them: ``\\r``, ``\\x1b``, ``\\u202e``, ``\\ud800``.

    Args:
        longest: Characters of it that are kept; None is all of them.
    """
    line = _LAYOUT.sub(" ", str(text)).strip(" ")
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line[:longest]
