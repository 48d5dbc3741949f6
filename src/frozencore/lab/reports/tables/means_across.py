"""The macro-averages of several tables beside one another, like the paper's cross-scale means."""

from __future__ import annotations

from frozencore.lab.reports.labels import axis_name, value_name
from frozencore.lab.reports.sheets.sheet import Sheet, label, sentence
from frozencore.lab.reports.tables.averages import averages, over_rows
from frozencore.lab.reports.tables.pivot import Pivot
from frozencore.lab.reports.tables.pivot_sheet import average_cell, best_printed


def means_across(tables: list[Pivot], name: str) -> Sheet | None:
    """The macro-averages of several tables beside one another, like the paper's cross-scale means."""
    if len(tables) < 2 or tables[0].row_axes != ("task",) or not averages(tables[0]) or not over_rows(tables[0]):
        return None
    first, rows = tables[0], []
    for pivot in tables:
        line, decimals = averages(pivot)[0], pivot.measure.decimals
        labels = [label(value_name(axis, value)) for axis, value in pivot.group.items()]
        top = best_printed({column: cell.value for column, cell in line.cells.items()}, pivot)
        cells = [average_cell(line.cells[column], decimals, best=column in top) for column in pivot.columns]
        rows.append((*labels, *cells))
    return Sheet(
        name,
        f"{first.study.study.title}: means over the tasks",
        f"{sentence(first.measure.title)}; macro-average of unrounded task means ± its standard deviation over seeds.",
        (*map(axis_name, first.group), *map(first.column_name, first.columns)),
        tuple(rows),
        num_labels=len(first.group),
    )
