"""The best column of each row of a grid, and what became of the runs (paper, table "noqr-lr-sweep")."""

from __future__ import annotations

from frozencore.tune.run.record import TunedRecord
from frozencore_lab.reports.labels import axis_name, value_name
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, sentence
from frozencore_lab.reports.tables.pivot import Key, Pivot, PivotCell
from frozencore_lab.reports.tables.pivot_sheet import pivot_cell


def best_sheet(pivot: Pivot, name: str) -> Sheet:
    """A line for each row: its best mean, the column that has it, and how all the columns' runs ended."""
    over = ", ".join(map(axis_name, pivot.column_axes))
    rows = []
    for row in pivot.rows:
        labels = [label(value_name(axis, value)) for axis, value in zip(pivot.row_axes, row, strict=True)]
        best = _best(pivot, row)
        found = (
            (SheetCell("n/a", hint="no column is whole"), SheetCell(""))
            if best is None
            else (pivot_cell(pivot.cells[row, best], pivot.measure.decimals), label(pivot.column_name(best)))
        )
        rows.append((*labels, *found, label(_outcome(pivot, row, best))))
    return Sheet(
        name,
        f"{pivot.title}: the best of {over}",
        f"{sentence(pivot.measure.title)}; the best mean over {len(pivot.columns)} values of {over}, and how "
        "all their runs ended.",
        (*map(axis_name, pivot.row_axes), "best", "at", "outcome"),
        tuple(rows),
        num_labels=len(pivot.row_axes),
    )


def _best(pivot: Pivot, row: Key) -> Key | None:
    """The column of the best mean, the first of equal ones."""
    sign = -1 if pivot.measure.lower_is_better else 1
    means = {column: pivot.cells[row, column].mean for column in pivot.columns}
    known = {column: sign * mean for column, mean in means.items() if mean is not None}
    return max(known, key=lambda column: known[column]) if known else None


def _outcome(pivot: Pivot, row: Key, best: Key | None) -> str:
    runs = [run for column in pivot.columns for run in pivot.cells[row, column].runs]
    parts = []
    for status, word in (("diverged", "diverged"), ("failed", "failed"), ("missing", "missing")):
        count = sum(run.status == status for run in runs)
        if count:
            parts.append(f"all {count} runs {word}" if count == len(runs) else f"{count} of {len(runs)} runs {word}")
    if best is not None and (chance := _no_better_than_chance(pivot, pivot.cells[row, best])) is not None:
        parts.append(f"no better than chance ({100 * chance:.0f} %)")
    return "; ".join(parts) or "all runs trained"


def _no_better_than_chance(pivot: Pivot, cell: PivotCell) -> float | None:
    """Chance, where the accuracy of runs that trained is within two standard errors above it, or below."""
    ids = {run.run_id for run in cell.runs}
    records = [one.record for one in pivot.study.runs if one.run_id in ids and isinstance(one.record, TunedRecord)]
    details = [record.score for record in records if record.score is not None and record.score.chance is not None]
    if pivot.measure.key != "accuracy" or not details or cell.mean is None:
        return None
    chance = details[0].chance
    assert chance is not None
    error = sum(one.standard_error for one in details) / len(details)
    return chance if cell.mean / pivot.measure.scale <= chance + 2 * error else None
