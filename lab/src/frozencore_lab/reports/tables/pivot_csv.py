"""A pivot as CSV: its unrounded means, and each of its runs."""

from __future__ import annotations

from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.sheets.render import csv_lines
from frozencore_lab.reports.tables.pivot import Pivot


def means_csv(pivot: Pivot) -> str:
    """Unrounded means as ``campaign report --table`` reads them: the row, then each column by its own name."""
    head = ["/".join(pivot.row_axes), *map(column_key, pivot.columns)]
    lines = [
        [
            column_key(row),
            *("" if (mean := pivot.cells[row, column].mean) is None else mean for column in pivot.columns),
        ]
        for row in pivot.rows
    ]
    return csv_lines([head, *lines])


def runs_csv(pivot: Pivot) -> str:
    """Every run of a table on a line of its own."""
    lines = [
        [*row, *column, run.seed, "" if run.value is None else run.value, run.status, run.run_id or "", run.message]
        for (row, column), cell in pivot.cells.items()
        for run in cell.runs
    ]
    head = [*pivot.row_axes, *pivot.column_axes, "seed", pivot.measure.key, "status", "run", "message"]
    return csv_lines([head, *([_plain(value) for value in line] for line in lines)])


def _plain(value: object) -> object:
    return "/".join(value) if isinstance(value, tuple) else value
