"""How far a table's values are from the one that they are compared with, with the sign of the paper: value − reference.

The compared side of a table is its columns where the tasks are rows, and its rows where the tasks are columns. The
reference is one of that side; or ``matched``, on each task the one that was calibrated on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frozencore_lab.campaign.spec import MATCHED, column_key
from frozencore_lab.reports.sheets.sheet import SheetCell, signed
from frozencore_lab.reports.statistics.over_tasks import differences
from frozencore_lab.reports.tables.averages import over_rows
from frozencore_lab.reports.tables.pivot import Key, Pivot, PivotCell


@dataclass(frozen=True)
class ExtraLine:
    """Cells beside a table, by its rows, or below it, by its columns."""

    name: str
    cells: Mapping[Key, SheetCell]


def differences_beside(pivot: Pivot) -> list[ExtraLine]:
    """Columns of differences: one for each task that is a column, or for each column that the study names for it."""
    if not over_rows(pivot):
        alone = len(pivot.columns) == 1
        return [
            ExtraLine(
                f"Δ from {_name(pivot, column)}" if alone else f"{pivot.column_name(column)}: Δ",
                {row: _difference(pivot, row, column, reference) for row in pivot.rows},
            )
            for column in pivot.columns
            if (reference := _reference(pivot, column)) is not None
        ]
    named = [column for column in pivot.columns if column_key(column) in pivot.study.study.report.differences]
    references = {row: found for row in pivot.rows if (found := _reference(pivot, row)) is not None}
    if len(references) < len(pivot.rows):
        return []
    return [
        ExtraLine(
            f"{pivot.column_name(column)} − {_name(pivot, pivot.rows[0])}",
            {row: _difference(pivot, row, column, references[row]) for row in pivot.rows},
        )
        for column in named
    ]


def differences_below(pivot: Pivot) -> ExtraLine | None:
    """All differences of a table with a single row of tasks, in which no comparison over tasks can say them."""
    if not over_rows(pivot) or len(pivot.rows) > 1 or pivot.study.study.report.differences:
        return None
    (row,) = pivot.rows
    if (reference := _reference(pivot, row)) is None:
        return None
    cells = {column: _difference(pivot, row, column, reference) for column in pivot.columns}
    return ExtraLine(f"Δ from {_name(pivot, row)}", cells)


def _reference(pivot: Pivot, line: Key) -> Key | None:
    """The key of the compared side that is the reference of a line of the other side."""
    wanted = pivot.study.study.report.reference
    if over_rows(pivot):
        axes, keys, line_axes = pivot.column_axes, pivot.columns, pivot.row_axes
    else:
        axes, keys, line_axes = pivot.row_axes, pivot.rows, pivot.column_axes
    if wanted == MATCHED and axes == ("calibration_task",):
        return next((key for key in keys if key[0] == line[line_axes.index("task")]), None)
    return next((key for key in keys if column_key(key) == wanted), None) if wanted is not None else None


def _name(pivot: Pivot, line: Key) -> str:
    if pivot.study.study.report.reference == MATCHED:
        return MATCHED
    reference = _reference(pivot, line)
    assert reference is not None
    return pivot.column_name(reference) if over_rows(pivot) else pivot.row_name(reference)


def _difference(pivot: Pivot, row: Key, column: Key, reference: Key) -> SheetCell:
    """The cell less the reference's, of unrounded means; by seed in its hint."""
    at = (row, reference) if over_rows(pivot) else (reference, column)
    cell, base, decimals = pivot.cells[row, column], pivot.cells[at], pivot.measure.decimals
    if cell.mean is None or base.mean is None:
        return SheetCell("n/a", hint="a mean is missing")
    if at == (row, column):
        return SheetCell(f"{0:.{decimals}f} (ref.)", value=0.0)
    return signed(differences([cell.mean], [base.mean])[0], decimals, hint=_by_seed(cell, base, decimals))


def _by_seed(cell: PivotCell, base: PivotCell, decimals: int) -> str:
    values = {run.seed: run.value for run in base.runs}
    pairs = [(run.seed, run.value, values.get(run.seed)) for run in cell.runs]
    return "; ".join(
        f"seed {seed}: {signed(own - other, decimals).text}"
        for seed, own, other in pairs
        if own is not None and other is not None
    )
