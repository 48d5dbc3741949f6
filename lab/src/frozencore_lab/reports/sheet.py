"""A table for display, its labels, and its forms: Markdown, LaTeX (booktabs), CSV, and a table on the screen."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from frozencore.text import one_line
from frozencore.tune.methods import METHODS
from frozencore_lab.campaign.results import FinalRun
from frozencore_lab.tasks.paper import PAPER_TASKS

Status = Literal["done", "missing", "diverged", "failed", "absent"]
SHOWN: dict[Status, str] = {"missing": "-", "diverged": "div.", "failed": "failed", "absent": "n/a"}
"""The text of a cell without a number."""
LONG = 40
"""The most characters of a value in a file's name."""


@dataclass(frozen=True)
class SeedValue:
    """A run's value in a table, or the reason why it has none."""

    run: FinalRun
    value: float | None
    status: Status
    message: str = ""

    @property
    def seed(self) -> Any:
        return self.run.axes["seed"]

    def shown(self, form: str) -> str:
        """The value in a format, with its remark."""
        if self.value is None:
            return self.message
        return f"{self.value:{form}}" + (f" ({self.message})" if self.message else "")


@dataclass(frozen=True)
class SheetCell:
    """One cell.

    Attributes:
        spread: Shown small after ``±``.
        value: The unrounded value, for sorting and for CSV; None if there is none.
        best: Whether it is the best of the compared cells, which is shown bold.
        is_undefined: The inputs exist, but the statistic is undefined for them.
    """

    text: str
    spread: str = ""
    value: float | str | None = None
    best: bool = False
    hint: str = ""
    is_undefined: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the cell should have a number but has none."""
        return self.value is None and not self.is_undefined and self.text.split(" ")[0] in SHOWN.values()


Line = tuple[SheetCell, ...]


@dataclass(frozen=True)
class Sheet:
    """A table with a heading line; ``foot`` lines (averages) stay at the bottom when it is sorted.

    Attributes:
        name: The name of its files, without an ending.
        num_labels: The number of leading columns that are labels.
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
        """Make a sheet from at least one line; all lines have the same headings as keys."""
        made = list(lines)
        headings = tuple(made[0])
        rows = tuple(tuple(line[one] for one in headings) for line in made)
        return cls(name, title, note, headings, rows, num_labels=num_labels)


def label(text: str) -> SheetCell:
    return SheetCell(text, value=text)


def missing(hint: str = "", *, is_undefined: bool = False) -> SheetCell:
    """A cell without a number, with the reason."""
    return SheetCell(SHOWN["absent"], hint=hint, is_undefined=is_undefined)


def number(value: float | None, decimals: int, *, reason: str = "") -> SheetCell:
    """A cell with a number of given decimals and separated thousands; None gives ``n/a`` and the reason."""
    return missing(reason) if value is None else SheetCell(f"{value:,.{decimals}f}", value=value)


def interval(low: float, high: float, decimals: int) -> SheetCell:
    return SheetCell(f"{low:+.{decimals}f} to {high:+.{decimals}f}", value=low)


def signed(value: float, decimals: int, *, hint: str = "") -> SheetCell:
    """A cell with a signed difference; a printed zero has no sign."""
    shown = f"{value:+.{decimals}f}"
    return SheetCell(shown if float(shown) else f"{0:.{decimals}f}", value=value, hint=hint)


def transposed(sheet: Sheet) -> Sheet:
    """Swap lines and columns, for a screen narrower than the sheet; averages become the last columns."""
    assert sheet.num_labels == 1
    lines = (*sheet.rows, *sheet.foot)
    headings = ("", *(line[0].text for line in lines))
    rows = tuple((label(heading), *(line[i] for line in lines)) for i, heading in enumerate(sheet.headings) if i)
    return replace(sheet, headings=headings, rows=rows, foot=())


TASKS = {name: task.label or name for name, task in PAPER_TASKS.items()}
FAMILIES: dict[str, tuple[str, ...]] = {
    family: tuple(name for name, task in PAPER_TASKS.items() if task.family == family)
    for family in dict.fromkeys(task.family for task in PAPER_TASKS.values() if task.family is not None)
}
"""Families of the paper's tasks; other tasks have none."""
AXES = {
    "calibration_size": "calibration", "calibration_task": "calibrated on", "learning_rate": "lr", "rank": "r",
    "whiten": "whitening", "targets": "modules",
}  # fmt: skip
NO_NAME = ("method", "task", "model", "whiten", "targets", "calibration_task", "fisher", "coordinates")
"""Axes whose values need no axis name."""
WHITENING = {"none": "None", "input": "Input only", "output": "Output only", "both": "Both"}


def axis_name(axis: str) -> str:
    return AXES.get(axis, axis.replace("_", " "))


def method_name(name: str) -> str:
    """A method's label; the name itself if it is not in the table, as in records of another version."""
    return METHODS[name].label if name in METHODS else name


def column_label(name: str) -> str:
    """The label of a method, or of a variant with its method's label first: ``lora-r1`` is ``LoRA r1``."""
    if name in METHODS:
        return method_name(name)
    method = max((known for known in METHODS if name.startswith(f"{known}-")), key=len, default="")
    return method_name(method) + name.removeprefix(method).replace("-", " ")


def value_name(axis: str, value: Any) -> str:
    """The short form of a value: ``("q_proj", "v_proj")`` as ``q/v``."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        names = TASKS if axis == "calibration_task" else {}
        return "/".join(names.get(str(part), str(part).removesuffix("_proj")) for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    if axis == "method":
        return column_label(str(value))
    known = {"task": TASKS, "calibration_task": TASKS, "whiten": WHITENING}.get(axis, {})
    return known.get(str(value), str(value))


def full_name(axis: str, value: Any) -> str:
    """A value with its axis if the value alone is unclear: ``r 16``."""
    shown = value_name(axis, value)
    return shown if axis in NO_NAME and value is not None else f"{axis_name(axis)} {shown}"


def column_name(axes: Sequence[str], values: Sequence[Any]) -> str:
    """The label of a row or column from the values of its axes: ``FCCA, r 16``."""
    return ", ".join(full_name(axis, value) for axis, value in zip(axes, values, strict=True))


def titled(title: str, group: Mapping[str, Any]) -> str:
    """A study's title with the values that distinguish one of its tables."""
    return ", ".join([title, *(full_name(axis, value) for axis, value in group.items())])


def family_of(task: str) -> str | None:
    """The paper's family of a task, by its name or the paper's label."""
    plain = task.casefold()
    families = (
        family for family, names in FAMILIES.items() for name in names if plain in (name, TASKS[name].casefold())
    )
    return next(families, None)


def slug(group: Mapping[str, Any]) -> str:
    """Values as part of a file's name: ``-small-q-v``; of a long one its start and a hash."""
    found = ""
    for axis, value in group.items():
        shown = re.sub("[^a-z0-9.]+", "-", value_name(axis, value).lower()).strip("-")
        short = shown if len(shown) <= LONG else f"{shown[:LONG]}-{sha256(shown.encode()).hexdigest()[:8]}"
        found += f"-{short}"
    return found


def sentence(text: str) -> str:
    """The text with a capital letter at its start."""
    return text[:1].upper() + text[1:]


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "[": "{[}", "]": "{]}", "*": "{*}",  # behind the end of a line they would be its options
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "Δ": r"$\Delta$", "×": r"$\times$",
    "<": r"$<$", ">": r"$>$", "–": "--", "−": "$-$", "†": r"$^\dagger$", "²": "$^2$",
    "‖": r"$\|$", "ρ": r"$\rho$", "·": r"$\cdot$", "ᵀ": r"$^\top$",
}  # fmt: skip
WIDE = 9
FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")
MARKDOWN = re.compile(r"([\\`*_|<>\[\]#])")


def markdown(sheet: Sheet) -> str:
    """The title, the note and a pipe table, then the reasons of missing averages, because Markdown has no hints."""
    lines = [
        map(markdown_text, sheet.headings),
        ("---" if i < sheet.num_labels else "---:" for i in range(len(sheet.headings))),
        *(map(_markdown_cell, line) for line in (*sheet.rows, *sheet.foot)),
    ]
    head = f"**{markdown_text(sheet.title)}**\n\n" + (f"{markdown_text(sheet.note)}\n\n" if sheet.note else "")
    reasons = dict.fromkeys(cell.hint for line in sheet.foot for cell in line if cell.value is None and cell.hint)
    tail = "".join(f"\n- {markdown_text(reason)}" for reason in reasons) + ("\n" if reasons else "")
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines) + tail


def _markdown_cell(cell: SheetCell) -> str:
    text = markdown_text(_joined(cell))
    return f"**{text}**" if cell.best else text


def markdown_text(text: str) -> str:
    return MARKDOWN.sub(r"\\\1", one_line(text))


def latex(sheet: Sheet) -> str:
    """A table environment for the package booktabs and, if it is wide, graphicx; the best is bold."""
    columns = "l" * sheet.num_labels + "r" * (len(sheet.headings) - sheet.num_labels)
    parts = [[map(_latex, sheet.headings)], [map(_latex_cell, line) for line in sheet.rows]]
    parts += [[map(_latex_cell, line) for line in sheet.foot]] if sheet.foot else []
    body = "\n\\midrule\n".join("\n".join(" & ".join(line) + r" \\" for line in part) for part in parts)
    caption = ". ".join(_latex(part.rstrip(".")) for part in (sheet.title, sheet.note) if part)
    wide = len(sheet.headings) > WIDE
    kind, (before, after) = ("table*", (r"\resizebox{\textwidth}{!}{%", "}")) if wide else ("table", ("", ""))
    lines = [
        rf"\begin{{{kind}}}[htb]", r"\centering", r"\small", before, rf"\begin{{tabular}}{{{columns}}}", r"\toprule",
        body, r"\bottomrule", r"\end{tabular}" + after,
        rf"\caption{{{caption}.}}", rf"\label{{tab:{sheet.name}}}", rf"\end{{{kind}}}",
    ]  # fmt: skip
    return "\n".join(filter(None, lines)) + "\n"


def _latex_cell(cell: SheetCell) -> str:
    text = _latex(cell.text) + (rf"{{\scriptsize$\pm${_latex(cell.spread)}}}" if cell.spread else "")
    return rf"\textbf{{{text}}}" if cell.best else text


def _latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in one_line(text))


def csv_text(sheet: Sheet) -> str:
    """Unrounded values as CSV; missing values are empty."""
    return csv_lines([sheet.headings, *([cell.value for cell in line] for line in (*sheet.rows, *sheet.foot))])


def csv_lines(lines: Iterable[Iterable[object]]) -> str:
    """Values as CSV. A text that a spreadsheet would take for a formula gets a leading apostrophe."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        (f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value for value in line) for line in lines
    )
    return out.getvalue()


def without_apostrophe(cell: str) -> str:
    """Undo the apostrophe of :func:`csv_lines`."""
    return cell[1:] if cell[:1] == "'" and FORMULA.match(cell[1:]) else cell


def rich_table(sheet: Sheet) -> Table:
    """The sheet as a table on the screen; the best bold."""
    table = Table(title=Text(sheet.title), caption=Text(sheet.note) if sheet.note else None, title_justify="left")
    for i, heading in enumerate(sheet.headings):
        table.add_column(Text(heading), justify="left" if i < sheet.num_labels else "right")
    for i, line in enumerate((*sheet.rows, *sheet.foot)):
        texts = (Text(_joined(cell), style="bold" if cell.best else "") for cell in line)
        table.add_row(*texts, end_section=i == len(sheet.rows) - 1)
    return table


def _joined(cell: SheetCell) -> str:
    return f"{cell.text} ± {cell.spread}" if cell.spread else cell.text
