"""Macro-averages of a table over its tasks, from unrounded means, for complete sets only.

The functions take tables in the form of :attr:`Pivot.upright`: tasks are rows, compared values are columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from frozencore_lab.reports.labels import FAMILIES, column_name, family_of
from frozencore_lab.reports.statistics import mean, sample_std
from frozencore_lab.reports.tables.pivot import Key, Measure, Pivot


@dataclass(frozen=True)
class Average:
    """A macro-average with the sample standard deviation over the seeds' averages, or the reason why it is missing."""

    value: float | None
    std: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class AverageLine:
    """One line of averages, by the columns of the table.

    Attributes:
        ranked: Whether the averages can be ranked.
    """

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
            spreads = {column: _median_spread(pivot, rows, column) for column in pivot.columns}
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
        assert one.value is not None  # a cell with a missing value has no mean
        by_seed.setdefault(one.seed, []).append(one.value)
    value = mean({pivot.row_name(row): cell.mean for row, cell in cells.items()})
    return Average(value, sample_std([sum(values) / len(values) for values in by_seed.values()]))


def _median_spread(pivot: Pivot, rows: Sequence[Key], column: Key) -> Average:
    spreads = [pivot.cells[row, column].std for row in rows]
    known = [std for std in spreads if std is not None]
    return (
        Average(median(known)) if len(known) == len(spreads) else Average(None, reason="no median without every task")
    )


def ranked_printed(values: Mapping[Key, float | None], measure: Measure) -> tuple[set[Key], set[Key]]:
    """The keys with the best printed value, and with the second best if the best is unique.

    Both are empty if there is nothing to compare.
    """
    shown = {key: round(value, measure.decimals) for key, value in values.items() if value is not None}
    if len(shown) < 2 or not measure.ranked:
        return set(), set()
    places = sorted(set(shown.values()), reverse=not measure.lower_is_better)
    best, second = ({key for key, value in shown.items() if value == place} for place in (places[0], places[:2][-1]))
    return best, second if len(best) == 1 else set()
