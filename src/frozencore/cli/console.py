"""The console of the verbs: a terminal, a file or a pipe."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDE = 160  # columns in a file or a pipe, unless COLUMNS is set


class PlainConsole(Console):
    """Print text unchanged: brackets are not markup, colons are not emoji, and numbers are not coloured.

    Attributes:
        began: The time at which the command began, by ``time.perf_counter``; None outside a command.
    """

    began: float | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, but escape invisible characters, so that no escape sequence reaches the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_escaped(segment.text), segment.style)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if _is_visible(c) else c.encode("unicode_escape").decode() for c in text)


def _is_visible(character: str) -> bool:
    return character == "\n" or character.isprintable() or unicodedata.category(character) == "Zs"


console = PlainConsole()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = WIDE
