"""A table as it is shown, before it is Markdown, LaTeX, CSV, HTML or lines on a screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Status = Literal["done", "missing", "diverged", "failed", "absent"]


SHOWN: dict[Status, str] = {"missing": "-", "diverged": "div.", "failed": "failed", "absent": "n/a"}
"""What stands in a cell without a number."""
EMPTY = frozenset(SHOWN.values())


@dataclass(frozen=True)
class SeedValue:
    """One run behind a cell: its value as shown, or why there is none.

    Attributes:
        hashes: Of the run's model, rows and basis, as its record has them.
        correct: A letter for each scored row, 1 where the run was right; None where its record does not say.
    """

    seed: Any
    run_id: str | None
    value: float | None
    status: Status
    message: str
    hashes: Mapping[str, str]
    correct: str | None = None


@dataclass(frozen=True)
class SheetCell:
    """One cell.

    Attributes:
        spread: Shown small after ``±``.
        value: Unrounded, to sort by and for CSV; None where there is none.
        best, second: Of those that it is compared with; the one is bold, the other underlined.
        hint: Why it is as it is, in words.
        runs: Those behind it.
        is_undefined: All that it is computed from is there, but these numbers have no such statistic.
    """

    text: str
    spread: str = ""
    value: float | str | None = None
    best: bool = False
    second: bool = False
    hint: str = ""
    runs: tuple[SeedValue, ...] = ()
    is_undefined: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether a number belongs here that could not be had."""
        return self.value is None and not self.is_undefined and self.text.split(" ")[0] in EMPTY


Line = tuple[SheetCell, ...]


@dataclass(frozen=True)
class Sheet:
    """A table with a heading line; ``foot`` lines (averages) stay below when it is sorted.

    Attributes:
        name: Of its files, without an ending.
        num_labels: Leading columns that say what a line is.
    """

    name: str
    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[Line, ...]
    foot: tuple[Line, ...] = ()
    num_labels: int = 1


def label(text: str) -> SheetCell:
    return SheetCell(text, value=text)


def number(value: float | None, decimals: int, *, reason: str = "") -> SheetCell:
    """A number with so many decimals and thousands apart; ``n/a`` and why for None."""
    return SheetCell("n/a", hint=reason) if value is None else SheetCell(f"{value:,.{decimals}f}", value=value)


def transposed(sheet: Sheet) -> Sheet:
    """Columns as lines, for a screen that is narrower than the sheet; averages become the last columns."""
    assert sheet.num_labels == 1
    lines = (*sheet.rows, *sheet.foot)
    headings = ("", *(line[0].text for line in lines))
    rows = tuple((label(heading), *(line[i] for line in lines)) for i, heading in enumerate(sheet.headings) if i)
    return replace(sheet, headings=headings, rows=rows, foot=())


def signed(value: float, decimals: int, *, hint: str = "") -> SheetCell:
    """A difference with its sign; what prints as nought has none."""
    shown = f"{value:+.{decimals}f}"
    return SheetCell(shown if float(shown) else f"{0:.{decimals}f}", value=value, hint=hint)


def many(number: int, what: str) -> str:
    """``1 task``, ``11 tasks``."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def sentence(text: str) -> str:
    """With a capital at the start."""
    return text[:1].upper() + text[1:]
