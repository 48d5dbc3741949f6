"""Sheets on the screen."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from frozencore_lab.reports.sheet import Sheet, SheetCell, label, rich_table


def test_on_a_screen_averages_stand_below_the_rows_and_what_is_best_is_bold() -> None:
    rows = ((label("a"), SheetCell("79.7", "1.5", best=True)), (label("b"), SheetCell("68.1")))
    sheet = Sheet("t", "A title", "", ("task", "FCCA"), rows, foot=((label("Mean"), SheetCell("73.9")),))
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(rich_table(sheet))
    text = Text.from_ansi(console.file.getvalue())  # type: ignore[attr-defined]
    assert text.plain.index("79.7 ± 1.5") < text.plain.index("68.1") < text.plain.index("73.9")
    bold = "".join(text.plain[span.start : span.end] for span in text.spans if "bold" in str(span.style))
    assert "79.7 ± 1.5" in bold
    assert "68.1" not in bold
    assert "73.9" not in bold
