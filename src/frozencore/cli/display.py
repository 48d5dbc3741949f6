"""The console of the verbs, and their tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from frozencore.text import escaped

WIDE = 160  # columns in a file or a pipe, unless COLUMNS is set
SHORTEST_HEADING, UNLIMITED = 4, 10_000  # columns of a folded heading, and of a screen without an edge


class PlainConsole(Console):
    """Print text unchanged: brackets are not markup, colons are not emoji, and numbers are not coloured.

    Attributes:
        began: The time at which the command began, by ``time.perf_counter``; None outside a command.
    """

    began: float | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print as Rich does, but break lines between words only: a path that is wider than the screen stays whole."""
        super().print(*objects, **{"overflow": "ignore", "crop": False, **settings})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, but escape invisible characters, so that no escape sequence reaches the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


console = PlainConsole()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console.width = WIDE


def table_of(
    title: str | None,
    headings: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    names: Collection[str] = ("",),
    screen: Console = console,
) -> Table:
    """A table that keeps each number on one line; on a narrow screen names and headings are folded.

    Args:
        rows: The cells of each row; None for a line between two rows.
        names: The headings of columns that hold names. The others hold numbers, and are aligned right.
    """
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(Text(heading), justify="left" if heading in names else "right")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*map(Text, row))
    wide = Measurement.get(screen, screen.options.update(width=UNLIMITED), table).maximum
    for column in table.columns if wide > screen.width else ():
        column.overflow = "fold"
        if column.justify == "right":
            column.width = max([SHORTEST_HEADING, *(cell_len(str(cell)) for cell in column.cells)])
    return table
