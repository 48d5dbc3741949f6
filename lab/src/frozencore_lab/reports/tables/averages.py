"""Macro-averages of a table over its tasks: of unrounded means, of whole sets only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from frozencore.errors import DataError
from frozencore_lab.reports.labels import FAMILIES, family_of, full_name
from frozencore_lab.reports.statistics.over_tasks import sample_std
from frozencore_lab.reports.tables.pivot import Key, Pivot, PivotCell, mean_of


@dataclass(frozen=True)
class Average:
    """A macro-average with the sample standard deviation of the seeds' own ones, or why there is none."""

    value: float | None
    std: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class AverageLine:
    """One line of averages beside a table's rows (or columns, where those are the tasks).

    Attributes:
        ranked: Whether one of them is better than another.
    """

    name: str
    cells: Mapping[Key, Average]
    ranked: bool = True


def over_rows(pivot: Pivot) -> bool:
    """Whether a table's tasks are its rows, so that columns are compared and averages stand below them."""
    return "task" not in pivot.column_axes


def averages(pivot: Pivot) -> tuple[AverageLine, ...]:
    """Mean over the tasks of each column, for every value of the other row axes, and of the paper's task families; and
    the median over the tasks of the standard deviation over seeds.

    Where the tasks are columns, the same of each row. Empty for a table with fewer than two tasks, or without a mean.
    """
    axes = pivot.row_axes if over_rows(pivot) else pivot.column_axes
    if "task" not in axes or not pivot.study.study.report.mean:
        return ()
    place = axes.index("task")
    groups: dict[Key, list[Key]] = {}
    for key in pivot.rows if over_rows(pivot) else pivot.columns:
        groups.setdefault((*key[:place], *key[place + 1 :]), []).append(key)
    others = [axis for axis in axes if axis != "task"]
    lines = []
    for group, keys in groups.items():
        if len(keys) < 2:
            continue
        name = ", ".join(("Mean", *(full_name(axis, value) for axis, value in zip(others, group, strict=True))))
        lines.append(_line(pivot, name, keys))
        for family, tasks in FAMILIES.items():
            own = [key for key in keys if family_of(str(key[place])) == family]
            if len(own) == len(tasks) < len(keys):
                lines.append(_line(pivot, f"{name}, {family}", own))
        if len(pivot.study.study.axes["seed"]) > 1:
            lines.append(_spread_line(pivot, name.replace("Mean", "Median std", 1), keys))
    return tuple(lines)


def column_averages(pivot: Pivot) -> dict[Key, Average]:
    """The average of each column over all rows, whether or not the table shows it."""
    return {
        column: _average(
            {f"{pivot.column_name(column)} on {pivot.row_name(row)}": pivot.cells[row, column] for row in pivot.rows}
        )
        for column in pivot.columns
    }


def _line(pivot: Pivot, name: str, keys: list[Key]) -> AverageLine:
    along_rows = over_rows(pivot)
    cells = {}
    for other in pivot.columns if along_rows else pivot.rows:
        places = [(key, other) if along_rows else (other, key) for key in keys]
        named = {
            f"{pivot.column_name(column)} on {pivot.row_name(row)}": pivot.cells[row, column] for row, column in places
        }
        cells[other] = _average(named)
    return AverageLine(name, cells)


def _spread_line(pivot: Pivot, name: str, keys: list[Key]) -> AverageLine:
    cells = {}
    for other in pivot.columns if over_rows(pivot) else pivot.rows:
        places = [(key, other) if over_rows(pivot) else (other, key) for key in keys]
        spreads = [pivot.cells[place].std for place in places]
        known = [std for std in spreads if std is not None]
        whole = len(known) == len(spreads)
        cells[other] = Average(median(known) if whole else None, reason="" if whole else "no median without every task")
    return AverageLine(name, cells, ranked=False)


def _average(named: Mapping[str, PivotCell]) -> Average:
    try:
        value = mean_of(named)
    except DataError:
        lacking = [name for name, cell in named.items() if cell.mean is None]
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return Average(None, reason=f"no average without {lacking[0]}{more}")
    by_seed: dict[object, list[float]] = {}
    for run in (run for cell in named.values() for run in cell.runs):
        assert run.value is not None  # a cell that lacks one has no mean
        by_seed.setdefault(run.seed, []).append(run.value)
    own = [sum(values) / len(values) for values in by_seed.values()]
    return Average(value, sample_std(own))
