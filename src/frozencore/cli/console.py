"""The terminal, file or pipe that the verbs print to."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDE = 160  # columns of a table in a file or a pipe, unless COLUMNS says how many


class PlainConsole(Console):
    """Prints every text as text: brackets are no markup, colons no emoji, and no escape sequence is obeyed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As Rich does, with what no screen shows written out."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def shown(text: str) -> str:
    """A text, line ends and spaces kept, whose other characters that no screen shows are as Python writes them."""
    if text.isprintable():
        return text
    return "".join(c if _is_seen(c) else c.encode("unicode_escape").decode() for c in text)


def _is_seen(character: str) -> bool:
    return character == "\n" or character.isprintable() or unicodedata.category(character) == "Zs"


console = PlainConsole()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = WIDE
