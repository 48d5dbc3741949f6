"""Accuracy beside the values that train at once and in all (paper, table "efficiency-state")."""

from __future__ import annotations

from frozencore.tune.run.record import TunedRecord
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.labels import axis_name
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, number, sentence, signed
from frozencore_lab.reports.statistics.over_tasks import differences
from frozencore_lab.reports.tables.averages import Average, column_averages
from frozencore_lab.reports.tables.pivot import Key, Pivot
from frozencore_lab.reports.tables.pivot_sheet import average_cell, best_printed


def tradeoff_sheet(pivot: Pivot, name: str) -> Sheet:
    """Each column's macro-average, what it trains, and how far its average is from the reference's."""
    means, counts, decimals = column_averages(pivot), counted_values(pivot), pivot.measure.decimals
    wanted = pivot.study.study.report.reference
    reference = next((column for column in pivot.columns if column_key(column) == wanted), None)
    best = best_printed({column: mean.value for column, mean in means.items()}, pivot)
    rows = []
    for column in pivot.columns:
        line = [
            label(pivot.column_name(column)),
            average_cell(means[column], decimals, best=column in best),
            *(number(count, 0, reason="no run is done") for count in counts.get(column, (None, None))),
        ]
        if reference is not None:
            line.append(
                SheetCell("reference") if column == reference else _gap(means[column], means[reference], decimals + 1)
            )
        rows.append(tuple(line))
    headings = (", ".join(map(axis_name, pivot.column_axes)), "mean", "values at once", "values in all")
    return Sheet(
        name,
        f"{pivot.title}: {pivot.measure.title.split(',')[0]} and values",
        f"{sentence(pivot.measure.title)}, macro-average of unrounded task means ± its standard deviation over seeds.",
        headings if reference is None else (*headings, f"Δ vs. {pivot.column_name(reference)}"),
        tuple(rows),
    )


def _gap(own: Average, reference: Average, decimals: int) -> SheetCell:
    if own.value is None or reference.value is None:
        return SheetCell("n/a", hint=own.reason or reference.reason)
    return signed(differences([own.value], [reference.value])[0], decimals)


def counted_values(pivot: Pivot) -> dict[Key, tuple[int, int]]:
    """How many values each column trains at once and in all."""
    found = {}
    for run in pivot.study.runs:
        inside = all(run.axes[axis] == value for axis, value in pivot.group.items())
        if isinstance(run.record, TunedRecord) and inside:
            column = tuple(run.axes[axis] for axis in pivot.column_axes)
            found[column] = run.record.values_at_once, run.record.values_in_all
    return found
