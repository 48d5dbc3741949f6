"""Compare one column with each other column: over tasks, as in the paper, and over seeds and scored rows.

A table of task means comes from a study or a CSV file, which is read strictly: a cell that is not a number is an error.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from rich.console import Group

from frozencore.errors import DataError
from frozencore.text import unknown_name
from frozencore_lab.campaign.spec import MATCHED, column_key
from frozencore_lab.reports.pivot import Pivot, row_labels
from frozencore_lab.reports.sheet import (
    FAMILIES,
    Sheet,
    SheetCell,
    family_of,
    interval,
    label,
    method_name,
    missing,
    number,
    rich_table,
    signed,
    without_apostrophe,
)
from frozencore_lab.reports.statistics import (
    REAL_COVERAGE,
    adjusted,
    bootstrap_interval,
    differences,
    holm,
    mean,
    mean_ranks,
    paired_difference,
    paired_t,
    signed_rank,
    whole,
    wins_ties_losses,
)

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
SUMMARIES = ("mean", "average", "avg", "macro-average", "total")


@dataclass(frozen=True)
class TaskTable:
    """Task means by column and task; ``columns[name][task]`` is None for a missing cell."""

    tasks: tuple[str, ...]
    columns: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Pair:
    """The reference against one other column; a positive difference favours the reference.

    Attributes:
        wins, ties, losses: Tasks on which the reference is better, equal, worse.
        wilcoxon_p, t_p: Two-sided and unadjusted; t_p is None if all differences are equal.
        wilcoxon_holm, t_holm: Adjusted for all compared columns.
        interval: The 95 % interval of the mean difference, by bootstrap over tasks.
    """

    other: str
    mean_difference: float
    interval: tuple[float, float]
    wins: int
    ties: int
    losses: int
    wilcoxon_p: float
    wilcoxon_holm: float
    t_p: float | None
    t_holm: float | None


@dataclass(frozen=True)
class Comparison:
    """Means, ranks (1 is best) and family means of every column, and each comparison with the reference."""

    reference: str
    tasks: tuple[str, ...]
    lower_is_better: bool
    means: Mapping[str, float]
    family_means: Mapping[str, Mapping[str, float]]
    mean_ranks: Mapping[str, float]
    pairs: tuple[Pair, ...]


def analyse(table: TaskTable, reference: str, *, lower_is_better: bool = False) -> Comparison:
    """Compare a column with every other one over the tasks.

    Raises:
        DataError: The column is unknown, there is nothing to compare, or a cell is missing or not finite.
    """
    if reference not in table.columns:
        raise DataError(unknown_name("column", reference, table.columns))
    if len(table.columns) < 2 or len(table.tasks) < 2:
        raise DataError(
            f"A comparison needs two columns and two tasks, but {len(table.columns)} and {len(table.tasks)} was given."
        )
    columns = table.columns.items()
    values = {name: whole({f"{name} on {task}": cells.get(task) for task in table.tasks}) for name, cells in columns}
    means = {name: mean({task: cells[task] for task in table.tasks}) for name, cells in columns}
    families = {name: family_means(cells) for name, cells in columns}
    ranks = mean_ranks(values, lower_is_better=lower_is_better)
    pairs = tuple(_pairs(values, reference, -1 if lower_is_better else 1))
    return Comparison(reference, table.tasks, lower_is_better, means, families, ranks, pairs)


def family_means(by_task: Mapping[str, float | None]) -> dict[str, float]:
    """The mean over the tasks of each complete family of the paper."""
    members: dict[str, dict[str, float | None]] = {}
    for task, value in by_task.items():
        if (family := family_of(task)) is not None:
            members.setdefault(family, {})[task] = value
    return {family: mean(own) for family, own in members.items() if len(own) == len(FAMILIES[family])}


def _pairs(values: Mapping[str, Sequence[float]], reference: str, sign: int) -> Iterator[Pair]:
    gains = {
        name: [sign * d for d in differences(values[reference], own)]
        for name, own in values.items()
        if name != reference
    }
    ranked, t_p = [signed_rank(own) for own in gains.values()], [paired_t(own) for own in gains.values()]
    adjusted = zip(ranked, holm(ranked), t_p, holm(t_p), strict=True)
    for (name, own), (wilcoxon_p, wilcoxon_holm, p, t_holm) in zip(gains.items(), adjusted, strict=True):
        assert wilcoxon_holm is not None
        counts = wins_ties_losses(own)
        mean_gain, interval = sum(own) / len(own), bootstrap_interval(own)
        yield Pair(name, mean_gain, interval, *counts, wilcoxon_p, wilcoxon_holm, p, t_holm)


def read_task_means(path: Path) -> TaskTable:
    """Read a CSV of task means: a heading line, then a line for each task, with its name and a number for each column.

    Raises:
        DataError: A line or cell is wrong; the message names it.
    """
    try:
        lines = list(csv.reader(StringIO(path.read_text(encoding="utf-8-sig")), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read as a CSV table: {reason}.") from error
    texts = ([without_apostrophe(cell).strip() for cell in line] for line in lines)
    rows = [(i, line) for i, line in enumerate(texts, 1) if any(line)]
    if len(rows) < 2:
        raise DataError(f"{path} holds no table: a heading line and a line for each task are needed.")
    (_, (_, *names)), *body = rows
    if not names:
        raise DataError(
            f"{path} has one column only. Separate columns with commas: the task, then one for each method."
        )
    for what, own in (("column", names), ("task", [cells[0] for _, cells in body])):
        for name in own:
            if not name:
                raise DataError(f"{path} has a {what} without a name.")
            if own.count(name) > 1:
                raise DataError(f"{path} has the {what} {name!r} twice.")
    columns: dict[str, dict[str, float | None]] = {name: {} for name in names}
    for i, (task, *cells) in body:
        if task.casefold() in SUMMARIES:
            raise DataError(f"{path}, line {i}: {task!r} is no task but a summary. Leave that line out.")
        if len(cells) != len(names):
            raise DataError(f"{path}, line {i}: {task} must have {len(names)} numbers, but {len(cells)} was given.")
        for name, cell in zip(names, cells, strict=True):
            where = f"{path}, line {i}: {name} on {task}"
            if not cell:
                raise DataError(f"{where} is missing. Fill it in, or leave the line or the column out.")
            if not NUMBER.fullmatch(cell) or math.isinf(float(cell)):
                raise DataError(f"{where} must be a finite number, but {cell!r} was given.")
            columns[name][task] = float(cell)
    return TaskTable(tuple(cells[0] for _, cells in body), columns)


def compare(pivot: Pivot) -> tuple[Comparison | None, str]:
    """Compare a table's reference column with the other complete columns; also return a remark on what is left out.

    None if the study has no reference that is one column, or its rows (or columns) are not tasks, each once, because
    tasks are the unit of replication.
    """
    pivot, reference = pivot.upright, pivot.report.reference
    if reference in (None, MATCHED) or "task" not in pivot.row_axes or len(pivot.rows) < 2 or not pivot.measure.ranked:
        return None, ""
    if len({row[pivot.row_axes.index("task")] for row in pivot.rows}) < len(pivot.rows):
        return None, "No comparison: a task has several rows, which are no independent ones."
    rows, shown = {row: pivot.row_name(row) for row in pivot.rows}, names_of(pivot)
    means = {
        column_key(column): {name: pivot.cells[row, column].mean for row, name in rows.items()}
        for column in pivot.columns
    }
    lacking = [name for name, cells in means.items() if None in cells.values()]
    if reference in lacking:
        return None, f"No comparison: {shown[reference]} lacks runs."
    whole = {name: cells for name, cells in means.items() if name not in lacking}
    note = f"Left out, as runs are missing: {', '.join(shown[name] for name in lacking)}." if lacking else ""
    try:
        table = TaskTable(tuple(rows.values()), whole)
        return analyse(table, reference, lower_is_better=pivot.measure.lower_is_better), note
    except DataError as error:
        return None, f"No comparison: {error} {note}".rstrip()


def names_of(pivot: Pivot) -> dict[str, str]:
    """The labels of a table's columns, by their names in a comparison."""
    return {column_key(column): pivot.column_name(column) for column in pivot.columns}


def comparison_sheet(
    comparison: Comparison,
    *,
    name: str = "significance",
    title: str = "",
    note: str = "",
    decimals: int = 2,
    names: Mapping[str, str] | None = None,
) -> Sheet:
    """A line for each comparison with the reference; the reference's own mean and rank come first.

    Wins are tasks on which the reference is better; a positive difference favours it.

    Args:
        names: The labels of columns; by default the labels of methods.
    """
    names = names or {column: method_name(column) for column in comparison.means}
    pairs = {pair.other: pair for pair in comparison.pairs}
    lines = [
        {
            "column": label(names[column]),
            **_tests(pairs.get(column), decimals),
            "mean": number(comparison.means[column], decimals),
            "mean rank": number(comparison.mean_ranks[column], 2),
        }
        for column in (comparison.reference, *pairs)
    ]
    reference, num_tasks = names[comparison.reference], len(comparison.tasks)
    better, real = "lower" if comparison.lower_is_better else "higher", REAL_COVERAGE.get(num_tasks)
    narrow = f", which is too narrow: of {num_tasks} normal differences it holds the mean in {real:.0%}" if real else ""
    explained = (
        f"{reference} against each other column over {num_tasks} tasks, {better} is better; Δ > 0 and wins "
        f"are {reference}'s. Two-sided exact Wilcoxon signed-rank and paired t, unadjusted and Holm-adjusted over "
        f"{len(comparison.pairs)}; interval by bootstrap over tasks{narrow}."
    )
    return Sheet.of(name, title or f"{reference} against the others", " ".join(filter(None, (explained, note))), lines)


def _tests(pair: Pair | None, decimals: int) -> dict[str, SheetCell]:
    """The statistics of a comparison by heading; empty cells for the reference itself."""
    headings = ("mean Δ", "95 % interval", "wins", "ties", "losses", "Wilcoxon p", "Holm", "t-test p", "Holm (t)")
    if pair is None:
        return dict.fromkeys(headings, SheetCell(""))
    difference = SheetCell(f"{pair.mean_difference:+.{decimals}f}", value=pair.mean_difference)
    counts = (number(count, 0) for count in (pair.wins, pair.ties, pair.losses))
    tests = map(p_cell, (pair.wilcoxon_p, pair.wilcoxon_holm, pair.t_p, pair.t_holm))
    return dict(zip(headings, (difference, interval(*pair.interval, decimals), *counts, *tests), strict=True))


def differences_sheet(pivot: Pivot, name: str) -> Sheet | None:
    """A line for each row and column beside the reference, over seeds and rows; None without anything to compare.

    Holm's adjustment is over the columns of one row.
    """
    lines, over, pivot = [], set[str](), pivot.upright
    if pivot.reference is None or not pivot.measure.ranked:
        return None
    decimals = pivot.measure.decimals + 1
    for row in pivot.rows:
        own = {column: pivot.cells[row, column].scored(pivot.measure) for column in pivot.columns}
        base = own.pop(pivot.reference)
        whole = {column: runs for column, runs in own.items() if runs and base and runs.keys() == base.keys()}
        found = adjusted([paired_difference([*runs.values()], [*(base or {}).values()]) for runs in whole.values()])
        labels = row_labels(pivot, row)
        for column, one in zip(whole, found, strict=True):
            if one.half is None:
                continue
            over.add(one.over)
            lines.append({
                **labels,
                "column": label(pivot.column_name(column)),
                "Δ": signed(one.mean, decimals),
                "95 % interval": interval(one.mean - one.half, one.mean + one.half, decimals),
                "p": p_cell(one.p),
                "Holm": p_cell(one.holm),
            })  # fmt: skip
    if not lines:
        return None
    reference = pivot.column_name(pivot.reference)
    note = (
        f"Each column less {reference}, paired by seed; bootstrap over "
        f"{' or '.join(sorted(over))}, with Student's t for few seeds; Holm over the columns of a line's row."
    )
    if "seeds" in over:
        note += " Scores that a record does not hold by row are compared over seeds alone."
    title = f"{pivot.title}: differences from {reference} ({pivot.measure.title})"
    return Sheet.of(name, title, note, lines, num_labels=len(pivot.row_axes) + 1)


def family_sheet(comparison: Comparison, *, decimals: int = 2) -> Sheet | None:
    """A sheet of means of the paper's complete task families; None if there are none."""
    if not comparison.family_means[comparison.reference]:
        return None
    lines = (
        {"column": label(method_name(column)), **{family: number(mean, decimals) for family, mean in means.items()}}
        for column, means in comparison.family_means.items()
    )
    return Sheet.of("families", "Means of the task families", "", lines)


def comparison_view(comparison: Comparison) -> Group:
    """Show a comparison on 80 columns: the tests, then means, ranks and intervals, then task families."""
    decimals = 2 if max(map(abs, comparison.means.values())) >= 10 else 4  # per cent, or shares and nats
    whole = comparison_sheet(comparison, decimals=decimals)
    counts = [SheetCell("/".join(cell.text for cell in line[3:6] if cell.text)) for line in whole.rows]
    tests = tuple((*line[:2], count, *line[6:10]) for line, count in zip(whole.rows, counts, strict=True))
    means = tuple((line[0], *line[10:], line[2]) for line in whole.rows)
    sheets = [
        replace(whole, headings=(*whole.headings[:2], "w/t/l", *whole.headings[6:10]), rows=tests),
        Sheet("means", "Means over the tasks", "", ("column", *whole.headings[10:], "95 % interval of Δ"), means),
        family_sheet(comparison, decimals=decimals),
    ]
    return Group(*(rich_table(sheet) for sheet in sheets if sheet is not None))


def p_cell(value: float | None) -> SheetCell:
    """A cell with a p-value in the paper's form: ``.0137``."""
    if value is None:
        return missing("the differences have no spread", is_undefined=True)
    return SheetCell("< .0001" if value < 1e-4 else f"{value:.4f}".removeprefix("0"), value=value)
