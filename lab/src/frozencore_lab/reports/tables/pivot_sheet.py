"""Make a sheet of a pivot: means over seeds with their spread, the best marked, with averages and differences.

A difference has the paper's sign: value − reference. The reference is a column of the table, or with ``matched`` the
column calibrated on the same task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frozencore_lab.campaign.spec import MATCHED, column_key
from frozencore_lab.reports.labels import axis_name, sentence, value_name
from frozencore_lab.reports.sheet import SHOWN, Sheet, SheetCell, label, missing, number, signed
from frozencore_lab.reports.statistics import differences
from frozencore_lab.reports.tables.averages import Average, averages, ranked_printed
from frozencore_lab.reports.tables.pivot import Key, Pivot


@dataclass(frozen=True)
class ExtraLine:
    """A line of cells beside a table (by its rows) or below it (by its columns)."""

    name: str
    cells: Mapping[Key, SheetCell]


def pivot_sheet(pivot: Pivot, name: str) -> Sheet:
    """Mean ± sample standard deviation over seeds, the best of each task bold, averages and differences below.

    If tasks are columns, averages and differences are at the right.
    """
    upright = pivot.upright
    turned = upright is not pivot
    of_compared = [*_average_lines(upright), *_differences_by_task(upright, turned=turned)]
    beside = of_compared if turned else [*_named_differences(pivot), *_base_model(pivot)]
    below = [] if turned else of_compared
    best = {(column, row) if turned else (row, column) for row, column in _best(upright)}
    rows = []
    for row in pivot.rows:
        labels = [label(value_name(axis, value)) for axis, value in zip(pivot.row_axes, row, strict=True)]
        cells = [pivot_cell(pivot, row, column, best=(row, column) in best) for column in pivot.columns]
        rows.append((*labels, *cells, *(line.cells[row] for line in beside)))
    foot = [
        (
            *[label(line.name), *[label("")] * (len(pivot.row_axes) - 1)],
            *(line.cells[column] for column in pivot.columns),
            *[SheetCell("")] * len(beside),
        )
        for line in below
    ]
    headings = (*map(axis_name, pivot.row_axes), *map(pivot.column_name, pivot.columns), *(one.name for one in beside))
    note = _note(pivot, differs=any("Δ" in line.name or "−" in line.name for line in (*beside, *below)))
    return Sheet(name, pivot.title, note, headings, tuple(rows), tuple(foot), len(pivot.row_axes))


def _average_lines(pivot: Pivot) -> list[ExtraLine]:
    lines = []
    for line in averages(pivot):
        values = {key: cell.value for key, cell in line.cells.items()}
        best = ranked_printed(values, pivot.measure)[0] if line.ranked else set()
        cells = {key: average_cell(cell, pivot.measure.decimals, best=key in best) for key, cell in line.cells.items()}
        lines.append(ExtraLine(line.name, cells))
    return lines


def _differences_by_task(pivot: Pivot, *, turned: bool) -> list[ExtraLine]:
    """Difference lines for tasks as columns, or for a single task, which has no comparison over tasks."""
    if not turned and (len(pivot.rows) > 1 or pivot.report.differences):
        return []
    return [
        ExtraLine(
            f"Δ from {_name(pivot, reference)}" if len(pivot.rows) == 1 else f"{pivot.row_name(row)}: Δ",
            {column: _difference(pivot, row, column, reference) for column in pivot.columns},
        )
        for row in pivot.rows
        if (reference := _reference(pivot, row)) is not None
    ]


def _named_differences(pivot: Pivot) -> list[ExtraLine]:
    """Difference lines for the columns that the study names."""
    references = {row: found for row in pivot.rows if (found := _reference(pivot, row)) is not None}
    if len(references) < len(pivot.rows):
        return []
    return [
        ExtraLine(
            f"{pivot.column_name(column)} − {_name(pivot, references[pivot.rows[0]])}",
            {row: _difference(pivot, row, column, references[row]) for row in pivot.rows},
        )
        for column in pivot.columns
        if column_key(column) in pivot.report.differences
    ]


def _base_model(pivot: Pivot) -> list[ExtraLine]:
    """The line of the base model's values."""
    if not pivot.before or "task" not in pivot.row_axes:
        return []
    known = {row: number(value, pivot.measure.decimals) for row, value in pivot.before.items()}
    return [ExtraLine("base model", {row: known.get(row, SheetCell("-")) for row in pivot.rows})]


def _reference(pivot: Pivot, row: Key) -> Key | None:
    """The reference column of a row."""
    if pivot.report.reference == MATCHED and pivot.column_axes == ("calibration_task",):
        task = row[pivot.row_axes.index("task")]
        return next((column for column in pivot.columns if column[0] == task), None)
    return pivot.reference


def _name(pivot: Pivot, reference: Key) -> str:
    return MATCHED if pivot.report.reference == MATCHED else pivot.column_name(reference)


def _difference(pivot: Pivot, row: Key, column: Key, reference: Key) -> SheetCell:
    cell, base, decimals = pivot.cells[row, column], pivot.cells[row, reference], pivot.measure.decimals
    if cell.mean is None or base.mean is None:
        return missing("a mean is missing")
    if column == reference:
        return SheetCell(f"{0:.{decimals}f} (ref.)", value=0.0)
    values = {one.seed: one.value for one in base.runs}
    pairs = [(one.seed, one.value, values.get(one.seed)) for one in cell.runs]
    hint = "; ".join(
        f"seed {seed}: {signed(own - other, decimals).text}"
        for seed, own, other in pairs
        if own is not None and other is not None
    )
    return signed(differences([cell.mean], [base.mean])[0], decimals, hint=hint)


def _note(pivot: Pivot, *, differs: bool) -> str:
    seeds, measure = pivot.study.study.axes["seed"], pivot.measure
    shown = f"mean ± sample standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    better = f"; {measure.better} is better" if measure.ranked else ""
    found = [f"{sentence(measure.title)}; {shown}{better}."]
    if differs:
        found.append("Differences are of unrounded means: the value less the reference's.")
    runs = [run for cell in pivot.cells.values() for run in cell.runs]
    zero = sum(run.status == "diverged" and run.value is not None for run in runs)
    if zero:
        found.append(f"† {zero} of {len(runs)} runs diverged and count as {measure.diverged:.{measure.decimals}f}.")
    return " ".join(found)


def pivot_cell(pivot: Pivot, row: Key, column: Key, *, best: bool = False) -> SheetCell:
    """A cell with mean ± standard deviation, or the reason why it is missing; a dagger if a diverged run is counted."""
    cell, decimals = pivot.cells[row, column], pivot.measure.decimals
    hint = "; ".join(f"seed {one.seed}: {one.shown(f'.{decimals}f')}" for one in cell.runs)
    if cell.mean is None:
        counted = f" {len(cell.known)}/{len(cell.runs)}" if cell.known else ""
        return SheetCell(SHOWN[cell.status] + counted, hint=hint, runs=cell.runs)
    mark = "†" if cell.status == "diverged" else ""
    return SheetCell(
        f"{cell.mean:.{decimals}f}{mark}", _spread(cell.std, decimals), cell.mean, best, hint=hint, runs=cell.runs
    )


def average_cell(average: Average, decimals: int, *, best: bool = False, second: bool = False) -> SheetCell:
    if average.value is None:
        return missing(average.reason)
    return SheetCell(f"{average.value:.{decimals}f}", _spread(average.std, decimals), average.value, best, second)


def _spread(std: float | None, decimals: int) -> str:
    return "" if std is None else f"{std:.{decimals}f}"


def _best(pivot: Pivot) -> set[tuple[Key, Key]]:
    """The cells with the best printed mean of their task.

    A cell in which all runs diverged is never the best, because its 0 is not a measured accuracy.
    """
    found = {(row, one) for row in pivot.rows for one in ranked_printed(pivot.row_means(row), pivot.measure)[0]}
    return {place for place in found if any(run.status != "diverged" for run in pivot.cells[place].runs)}
