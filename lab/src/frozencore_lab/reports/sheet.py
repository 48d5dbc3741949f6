"""A table as it is shown, before it is Markdown, LaTeX, CSV, HTML or lines on a screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from frozencore_lab.campaign.results import FinalRun

Status = Literal["done", "missing", "diverged", "failed", "absent"]
SHOWN: dict[Status, str] = {"missing": "-", "diverged": "div.", "failed": "failed", "absent": "n/a"}
"""What stands in a cell without a number."""


@dataclass(frozen=True)
class SeedValue:
    """A run's value as a table shows it, or the reason why the run has none."""

    run: FinalRun
    value: float | None
    status: Status
    message: str = ""

    @property
    def seed(self) -> Any:
        return self.run.axes["seed"]

    def shown(self, form: str) -> str:
        """The value in a format, and what is to be said of it."""
        if self.value is None:
            return self.message
        return f"{self.value:{form}}" + (f" ({self.message})" if self.message else "")


@dataclass(frozen=True)
class SheetCell:
    """One cell.

    Attributes:
        spread: Shown small after ``±``.
        value: Unrounded, for sorting and for CSV; None where there is none.
        best, second: Whether it is the best (bold) or the second best (underlined) of those that it is compared with.
        hint: Why it is as it is, in words.
        runs: The runs that it was computed from.
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
        return self.value is None and not self.is_undefined and self.text.split(" ")[0] in SHOWN.values()


Line = tuple[SheetCell, ...]


@dataclass(frozen=True)
class Sheet:
    """A table with a heading line; ``foot`` lines (averages) stay below when it is sorted.

    Attributes:
        name: The name of its files, without an ending.
        num_labels: How many leading columns say what a line is.
    """

    name: str
    title: str
    note: str
    headings: tuple[str, ...]
    rows: tuple[Line, ...]
    foot: tuple[Line, ...] = ()
    num_labels: int = 1

    @classmethod
    def of(
        cls, name: str, title: str, note: str, lines: Iterable[Mapping[str, SheetCell]], *, num_labels: int = 1
    ) -> Sheet:
        """A sheet of at least one line; every line names the headings of its cells, the same ones."""
        first, *others = lines
        headings = tuple(first)
        return cls(
            name, title, note, headings, tuple(tuple(line[one] for one in headings) for line in (first, *others)),
            num_labels=num_labels,
        )  # fmt: skip


def label(text: str) -> SheetCell:
    return SheetCell(text, value=text)


def missing(hint: str = "", *, is_undefined: bool = False) -> SheetCell:
    """A cell without a number, and why."""
    return SheetCell(SHOWN["absent"], hint=hint, is_undefined=is_undefined)


def number(value: float | None, decimals: int, *, reason: str = "") -> SheetCell:
    """A number with so many decimals and thousands apart; ``n/a`` and the reason for None."""
    return missing(reason) if value is None else SheetCell(f"{value:,.{decimals}f}", value=value)


def interval(low: float, high: float, decimals: int) -> SheetCell:
    return SheetCell(f"{low:+.{decimals}f} to {high:+.{decimals}f}", value=low)


def signed(value: float, decimals: int, *, hint: str = "") -> SheetCell:
    """A difference with its sign; what prints as nought has none."""
    shown = f"{value:+.{decimals}f}"
    return SheetCell(shown if float(shown) else f"{0:.{decimals}f}", value=value, hint=hint)


def transposed(sheet: Sheet) -> Sheet:
    """Columns as lines, for a screen that is narrower than the sheet; averages become the last columns."""
    assert sheet.num_labels == 1
    lines = (*sheet.rows, *sheet.foot)
    headings = ("", *(line[0].text for line in lines))
    rows = tuple((label(heading), *(line[i] for line in lines)) for i, heading in enumerate(sheet.headings) if i)
    return replace(sheet, headings=headings, rows=rows, foot=())
