"""Arrange a study in tables: the values over seeds of every combination of row and column axes, and their averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import NamedTuple

from frozencore.tune.record import TunedRecord
from frozencore_lab.campaign.plan import Axes
from frozencore_lab.campaign.results import FinalRun, StudyResults
from frozencore_lab.campaign.spec import Report, Value, column_key
from frozencore_lab.reports.sheet import (
    FAMILIES,
    SeedValue,
    SheetCell,
    Status,
    axis_name,
    column_name,
    csv_lines,
    family_of,
    label,
    slug,
    titled,
    value_name,
)
from frozencore_lab.reports.statistics import Scored, mean, sample_std, scored

Key = tuple[Value, ...]


@dataclass(frozen=True)
class Measure:
    """The measure that a table shows.

    Attributes:
        key: The name of the value in a record; the table shows ``scale`` times the value.
        before: The name of the base model's value in a record.
        ranked: Whether values can be ranked.
        perfect: The best possible value, if it can be reached.
        diverged: The value of a diverged run, if the study counts it.
        suffix: The suffix of the names of its files.
    """

    key: str
    title: str
    decimals: int
    scale: float = 1.0
    lower_is_better: bool = False
    before: str | None = None
    ranked: bool = True
    perfect: float | None = None
    diverged: float | None = None
    suffix: str = ""

    @property
    def better(self) -> str:
        return "lower" if self.lower_is_better else "higher"


LOSS_TITLE, FORGOTTEN_TITLE = "held-out loss, nats per token", "forgotten of other texts, nats per token"
COSINE_TITLE = "mean principal-angle cosine of {} to the reference"
ACCURACY = Measure("accuracy", "accuracy, %", 1, scale=100.0, before="accuracy_before", perfect=100.0, diverged=0.0)
LOSS = Measure("held_out_loss", LOSS_TITLE, 3, lower_is_better=True, before="held_out_loss_before", suffix="-loss")
FORGOTTEN = Measure("forgotten", FORGOTTEN_TITLE, 3, lower_is_better=True, suffix="-forgotten")
COSINES = (
    Measure("cosine_P", COSINE_TITLE.format("P"), 3, ranked=False, suffix="-cos-p"),
    Measure("cosine_Q", COSINE_TITLE.format("Q"), 3, ranked=False, suffix="-cos-q"),
)


def measures_of(results: StudyResults) -> tuple[Measure, ...]:
    """The measures of a study's tables: those in any record, or before the first record those of its kind."""
    records = [run.record for run in results.runs if run.record is not None]
    if not records:
        return (ACCURACY, LOSS) if results.study.kind.trains else COSINES
    return tuple(one for one in (ACCURACY, LOSS, FORGOTTEN, *COSINES) if any(record.has(one.key) for record in records))


def by_axes(runs: Iterable[FinalRun], *sides: Sequence[str]) -> dict[tuple[Key, ...], list[FinalRun]]:
    """Group runs by their values of some sets of axes, in order."""
    found: dict[tuple[Key, ...], list[FinalRun]] = {}
    for run in runs:
        found.setdefault(tuple(tuple(run.axes[axis] for axis in side) for side in sides), []).append(run)
    return found


def varied_axes(results: StudyResults) -> list[str]:
    """The axes of a study with several values, except model, task and seed."""
    axes = results.study.axes.items()
    return [axis for axis, values in axes if len(values) > 1 and axis not in ("model", "task", "seed")]


@dataclass(frozen=True)
class PivotCell:
    """The runs of one cell; it has a mean only if every seed has a value."""

    runs: tuple[SeedValue, ...]

    @property
    def known(self) -> list[float]:
        return [run.value for run in self.runs if run.value is not None]

    @property
    def record(self) -> TunedRecord | None:
        """The record of the first finished seed."""
        return next((one.run.record for one in self.runs if isinstance(one.run.record, TunedRecord)), None)

    @property
    def mean(self) -> float | None:
        known = self.known
        return math.fsum(known) / len(known) if known and len(known) == len(self.runs) else None

    @property
    def std(self) -> float | None:
        return None if self.mean is None else sample_std(self.known)

    def scored(self, measure: Measure) -> dict[object, Scored] | None:
        """Each seed's score with its rows; None if a seed has none, or a diverged run is counted."""
        records = {one.seed: one.run.record for one in self.runs if one.status == "done" and one.run.record}
        found = {seed: scored(record, measure.key, scale=measure.scale) for seed, record in records.items()}
        whole = len(found) == len(self.runs) > 0
        return {seed: one for seed, one in found.items() if one} if whole and all(found.values()) else None

    @property
    def status(self) -> Status:
        """``done``, or the first of diverged, failed, absent and missing that applies to a seed."""
        order: tuple[Status, ...] = ("diverged", "failed", "absent", "missing", "done")
        return min((run.status for run in self.runs), key=order.index, default="missing")


@dataclass(frozen=True)
class Pivot:
    """One table of a study; ``group`` has the values of axes that are neither rows nor columns."""

    study: StudyResults
    measure: Measure
    group: Axes
    row_axes: tuple[str, ...]
    column_axes: tuple[str, ...]
    rows: tuple[Key, ...]
    columns: tuple[Key, ...]
    cells: Mapping[tuple[Key, Key], PivotCell]

    @property
    def report(self) -> Report:
        return self.study.study.report

    @property
    def title(self) -> str:
        return titled(self.study.study.title, self.group)

    @property
    def name(self) -> str:
        """The name of its files, without ending and without the measure's suffix."""
        return f"{self.study.name}{slug(self.group)}"

    @property
    def reference(self) -> Key | None:
        return next((column for column in self.columns if column_key(column) == self.report.reference), None)

    @property
    def before(self) -> dict[Key, float]:
        """The base model's value by row, if all runs of the row agree in nine decimals."""
        name, scale, found = self.measure.before, self.measure.scale, {}
        for row in self.rows if name else ():
            records = [one.run.record for column in self.columns for one in self.cells[row, column].runs]
            starts = {getattr(record, str(name), None) for record in records}
            if len(values := {round(scale * start, 9) for start in starts if start is not None}) == 1:
                found[row] = values.pop()
        return found

    @property
    def upright(self) -> Pivot:
        """The table with compared values as columns: itself, or transposed if its columns are tasks."""
        if "task" not in self.column_axes:
            return self
        return replace(
            self, row_axes=self.column_axes, column_axes=self.row_axes, rows=self.columns, columns=self.rows,
            cells={(column, row): cell for (row, column), cell in self.cells.items()},
        )  # fmt: skip

    def row_name(self, row: Key) -> str:
        return column_name(self.row_axes, row)

    def column_name(self, column: Key) -> str:
        return column_name(self.column_axes, column)

    def row_means(self, row: Key) -> dict[Key, float | None]:
        return {column: self.cells[row, column].mean for column in self.columns}


def pivots(results: StudyResults, measure: Measure) -> list[Pivot]:
    """A study's tables of one measure, one for each combination of the axes except rows, columns and seed.

    Tasks without the measure, such as plain text without accuracy, are left out.
    """
    report = results.study.report
    axes = {**results.study.axes}
    axes["task"] = tuple(task for task in axes["task"] if task not in _tasks_without(results, measure))
    rows, columns = (tuple(product(*(axes[axis] for axis in side))) for side in (report.rows, report.columns))
    further = [axis for axis in axes if axis not in ("seed", *report.rows, *report.columns)]
    counted = measure if report.diverged_as_zero else replace(measure, diverged=None)
    runs, found = by_axes(results.runs, further, report.rows, report.columns), []
    for group in product(*(axes[axis] for axis in further)):
        cells = {
            (row, column): PivotCell(tuple(_seed_value(run, counted) for run in runs.get((group, row, column), ())))
            for row in rows
            for column in columns
        }
        shown = {axis: value for axis, value in zip(further, group, strict=True) if len(axes[axis]) > 1}
        found.append(Pivot(results, measure, shown, report.rows, report.columns, rows, columns, cells))
    return found


def _tasks_without(results: StudyResults, measure: Measure) -> set[Value]:
    done = [(run.axes["task"], run.record.has(measure.key)) for run in results.runs if run.record is not None]
    having = {task for task, has in done if has}
    return {task for task, _ in done} - having if having else set()


def _seed_value(run: FinalRun, measure: Measure) -> SeedValue:
    if run.failure is not None:
        message = f"{run.failure.reason}: {run.failure.message}"
        if run.failure.reason == "diverged":
            return SeedValue(run, measure.diverged, "diverged", message)
        return SeedValue(run, None, "failed", message)
    if run.record is None:
        return SeedValue(run, None, "missing", "not run")
    if not run.record.has(measure.key):
        return SeedValue(run, None, "absent", f"the record has no {measure.key}")
    value: float | None = getattr(run.record, measure.key)
    if value is None:
        return SeedValue(run, measure.diverged, "diverged", f"{measure.key} is not finite")
    return SeedValue(run, measure.scale * value, "done")


def row_labels(pivot: Pivot, row: Key) -> dict[str, SheetCell]:
    """The cells that name a row, by heading."""
    values = zip(pivot.row_axes, row, strict=True)
    return {axis_name(axis): label(value_name(axis, value)) for axis, value in values}


def means_csv(pivot: Pivot) -> str:
    """Unrounded means for ``campaign report --table``: the row, then each column by its name."""
    head = ["/".join(pivot.row_axes), *map(column_key, pivot.columns)]
    return csv_lines([head, *([column_key(row), *pivot.row_means(row).values()] for row in pivot.rows)])


def runs_csv(pivot: Pivot) -> str:
    """Every run of a table, one a line, as CSV."""
    head = [*pivot.row_axes, *pivot.column_axes, "seed", pivot.measure.key, "status", "run", "message"]
    lines = [
        [*row, *column, one.seed, one.value, one.status, one.run.run_id, one.message]
        for (row, column), cell in pivot.cells.items()
        for one in cell.runs
    ]
    return csv_lines([head, *(["/".join(map(str, x)) if isinstance(x, tuple) else x for x in line] for line in lines)])


class Average(NamedTuple):
    """A macro-average with the sample standard deviation over the seeds' averages, or the reason why it is missing."""

    value: float | None
    std: float | None = None
    reason: str = ""


class AverageLine(NamedTuple):
    """One line of averages, by the columns of the table, and whether they can be ranked."""

    name: str
    cells: Mapping[Key, Average]
    ranked: bool = True


def averages(pivot: Pivot) -> tuple[AverageLine, ...]:
    """Average each column over the tasks, for every value of the other row axes and for the paper's task families.

    A further line has the median over the tasks of the standard deviation over seeds. Empty for a table with fewer than
    two tasks, or without a mean.
    """
    if "task" not in pivot.row_axes or not pivot.report.mean:
        return ()
    place = pivot.row_axes.index("task")
    others = [axis for axis in pivot.row_axes if axis != "task"]
    groups: dict[Key, list[Key]] = {}
    for row in pivot.rows:
        groups.setdefault((*row[:place], *row[place + 1 :]), []).append(row)
    lines = []
    for group, rows in groups.items():
        if len(rows) < 2:
            continue
        of = f", {column_name(others, group)}" if others else ""
        lines.append(AverageLine(f"Mean{of}", column_averages(pivot, rows)))
        for family, tasks in FAMILIES.items():
            own = [row for row in rows if family_of(str(row[place])) == family]
            if len(own) == len(tasks) < len(rows):
                lines.append(AverageLine(f"Mean{of}, {family}", column_averages(pivot, own)))
        if len(pivot.study.study.axes["seed"]) > 1:
            spreads = {}
            for column in pivot.columns:
                known = [std for row in rows if (std := pivot.cells[row, column].std) is not None]
                lacks = Average(None, reason="no median without every task")
                spreads[column] = Average(median(known)) if len(known) == len(rows) else lacks
            lines.append(AverageLine(f"Median std{of}", spreads, ranked=False))
    return tuple(lines)


def column_averages(pivot: Pivot, rows: Sequence[Key] | None = None) -> dict[Key, Average]:
    """The average of each column over some or all rows."""
    return {column: _average(pivot, pivot.rows if rows is None else rows, column) for column in pivot.columns}


def _average(pivot: Pivot, rows: Sequence[Key], column: Key) -> Average:
    cells = {row: pivot.cells[row, column] for row in rows}
    lacking = [row for row, cell in cells.items() if cell.mean is None]
    if lacking or not cells:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        what = f"{pivot.column_name(column)} on {pivot.row_name(lacking[0])}" if lacking else "a row"
        return Average(None, reason=f"no average without {what}{more}")
    by_seed: dict[object, list[float]] = {}
    for one in (one for cell in cells.values() for one in cell.runs):
        by_seed.setdefault(one.seed, []).append(one.value or 0.0)  # no value is missing, because every cell has a mean
    value = mean({pivot.row_name(row): cell.mean for row, cell in cells.items()})
    return Average(value, sample_std([sum(values) / len(values) for values in by_seed.values()]))


def best_printed(values: Mapping[Key, float | None], measure: Measure) -> set[Key]:
    """The keys with the best printed value; empty if there is nothing to compare."""
    shown = {key: round(value, measure.decimals) for key, value in values.items() if value is not None}
    if len(shown) < 2 or not measure.ranked:
        return set()
    best = (min if measure.lower_is_better else max)(shown.values())
    return {key for key, value in shown.items() if value == best}
