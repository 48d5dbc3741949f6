"""Sheets on the screen."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from frozencore_lab.reports.labels import column_label
from frozencore_lab.reports.sheet import Sheet, SheetCell, label, rich_table, transposed


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


def test_on_a_narrow_screen_tasks_and_their_mean_are_columns() -> None:
    rows = ((label("a"), SheetCell("1"), SheetCell("2")), (label("b"), SheetCell("3"), SheetCell("4")))
    foot = ((label("Mean"), SheetCell("2.0"), SheetCell("3.0")),)
    turned = transposed(Sheet("t", "A title", "", ("task", "FCCA", "EVA"), rows, foot=foot))
    assert turned.headings == ("", "a", "b", "Mean")
    assert [[cell.text for cell in row] for row in turned.rows] == [["FCCA", "1", "3", "2.0"], ["EVA", "2", "4", "3.0"]]


def test_a_variant_is_called_by_the_label_of_its_method() -> None:
    names = ("eva", "lora-r1", "lora")
    assert [column_label(name) for name in names] == ["EVA-core", "LoRA r1", "LoRA"]
