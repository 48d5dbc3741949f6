"""A study as tables: the values over seeds of every combination of its row and column axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from frozencore.tune.run.record import Failure, RunRecord, TunedRecord
from frozencore_lab.campaign.plan import Axes
from frozencore_lab.campaign.results import FinalRun, StudyResults
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.reports.labels import column_name, full_name, slug
from frozencore_lab.reports.sheets.sheet import SeedValue, Status
from frozencore_lab.reports.statistics.over_tasks import mean, sample_std
from frozencore_lab.reports.tables.measures import Measure

Key = tuple[Value, ...]


@dataclass(frozen=True)
class PivotCell:
    """The runs of one cell; it has a mean only where every seed has a value."""

    runs: tuple[SeedValue, ...]

    @property
    def mean(self) -> float | None:
        values = [run.value for run in self.runs]
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(values) else None

    @property
    def std(self) -> float | None:
        return None if self.mean is None else sample_std([run.value for run in self.runs if run.value is not None])

    @property
    def status(self) -> Status:
        """``done``, or the first of diverged, failed, absent and missing that a seed has."""
        found = {run.status for run in self.runs}
        order: tuple[Status, ...] = ("diverged", "failed", "absent", "missing")
        return next((status for status in order if status in found), "done" if self.runs else "missing")

    @property
    def num_done(self) -> int:
        return sum(run.value is not None for run in self.runs)


@dataclass(frozen=True)
class Pivot:
    """One table of a study.

    Attributes:
        group: The values of the axes that are neither rows nor columns, where the study has several.
        before: The untouched model's value by row, where all runs of the row agree on it.
    """

    study: StudyResults
    measure: Measure
    group: Axes
    rows: tuple[Key, ...]
    columns: tuple[Key, ...]
    cells: Mapping[tuple[Key, Key], PivotCell]
    before: Mapping[Key, float]

    @property
    def row_axes(self) -> tuple[str, ...]:
        return self.study.study.report.rows

    @property
    def column_axes(self) -> tuple[str, ...]:
        return self.study.study.report.columns

    @property
    def title(self) -> str:
        names = [self.study.study.title, *(full_name(axis, value) for axis, value in self.group.items())]
        return ", ".join(names)

    @property
    def name(self) -> str:
        """Of its files, without an ending and without the measure's."""
        return f"{self.study.name}{slug(self.group)}"

    def row_name(self, row: Key) -> str:
        return column_name(self.row_axes, row)

    def column_name(self, column: Key) -> str:
        return column_name(self.column_axes, column)


def pivots(results: StudyResults, measure: Measure) -> list[Pivot]:
    """A study's tables of one measure: one for each combination of the axes that are neither rows, columns nor seed.

    Tasks whose records lack the measure, as plain text lacks accuracy, are left out.
    """
    report = results.study.report
    left_out = _tasks_without(results, measure)
    axes = {
        axis: tuple(value for value in values if axis != "task" or value not in left_out)
        for axis, values in results.study.axes.items()
    }
    further = [axis for axis in axes if axis not in ("seed", *report.rows, *report.columns)]
    found = []
    for values in product(*(axes[axis] for axis in further)):
        group = dict(zip(further, values, strict=True))
        members = [run for run in results.runs if all(run.axes[axis] == value for axis, value in group.items())]
        shown = {axis: value for axis, value in group.items() if len(axes[axis]) > 1}
        rows, columns = (tuple(product(*(axes[axis] for axis in side))) for side in (report.rows, report.columns))
        found.append(_pivot(results, measure, shown, rows, columns, members))
    return found


def _pivot(
    results: StudyResults,
    measure: Measure,
    group: Axes,
    rows: tuple[Key, ...],
    columns: tuple[Key, ...],
    members: list[FinalRun],
) -> Pivot:
    report = results.study.report
    runs: dict[tuple[Key, Key], list[SeedValue]] = {(row, column): [] for row in rows for column in columns}
    before: dict[Key, set[float]] = {row: set() for row in rows}
    for run in members:
        row, column = (tuple(run.axes[axis] for axis in side) for side in (report.rows, report.columns))
        if (row, column) not in runs:
            continue
        runs[row, column].append(_seed_value(run, measure, zero=report.diverged_as_zero))
        start = getattr(run.record, measure.before, None) if measure.before else None
        if start is not None:
            before[row].add(round(measure.scale * start, 9))
    return Pivot(
        results,
        measure,
        group,
        rows,
        columns,
        {key: PivotCell(tuple(values)) for key, values in runs.items()},
        {row: next(iter(values)) for row, values in before.items() if len(values) == 1},
    )


def _seed_value(run: FinalRun, measure: Measure, *, zero: bool) -> SeedValue:
    value, status, message = _reading(run.record, run.failure, measure)
    if status == "diverged" and zero:
        value = measure.diverged
    hashes = run.record.hashes.content() if run.record is not None and run.record.hashes is not None else {}
    score = run.record.score if isinstance(run.record, TunedRecord) else None
    correct = score.correct if score is not None else None
    return SeedValue(run.axes["seed"], run.run_id, value, status, message, hashes, correct)


def _reading(record: RunRecord | None, failure: Failure | None, measure: Measure) -> tuple[float | None, Status, str]:
    if record is None:
        if failure is None:
            return None, "missing", "not run"
        return None, "diverged" if failure.reason == "diverged" else "failed", f"{failure.reason}: {failure.message}"
    if not record.has(measure.key):
        return None, "absent", f"the record has no {measure.key}"
    value: float | None = getattr(record, measure.key)
    if value is None:
        return None, "diverged", f"{measure.key} is not finite"
    return measure.scale * value, "done", ""


def _tasks_without(results: StudyResults, measure: Measure) -> set[Value]:
    having = {run.axes["task"] for run in results.runs if run.record is not None and run.record.has(measure.key)}
    lacking = {run.axes["task"] for run in results.runs if run.record is not None}
    return lacking - having if having else set()


def mean_of(named: Mapping[str, PivotCell]) -> float:
    """Mean of the unrounded means of named cells.

    Raises:
        DataError: One has no mean; the line names it.
    """
    return mean({name: cell.mean for name, cell in named.items()})
