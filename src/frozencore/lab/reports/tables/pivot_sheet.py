"""A pivot as a sheet: means over seeds with their spread, the best marked, macro-averages beside or below."""

from __future__ import annotations

from collections.abc import Mapping

from frozencore.lab.reports.labels import axis_name, value_name
from frozencore.lab.reports.sheets.sheet import SeedValue, Sheet, SheetCell, label, number, sentence
from frozencore.lab.reports.tables.averages import Average, averages, over_rows
from frozencore.lab.reports.tables.measures import Measure
from frozencore.lab.reports.tables.pivot import SHOWN, Key, Pivot, PivotCell


def pivot_sheet(pivot: Pivot, name: str) -> Sheet:
    """Mean ± sample standard deviation over seeds, the best of each row bold, macro-averages below.

    Where the tasks are columns, the best of each column is bold and the averages stand at the right.
    """
    decimals, lines = pivot.measure.decimals, averages(pivot)
    best = _best(pivot)
    aside = () if over_rows(pivot) else lines
    below = lines if over_rows(pivot) else ()
    shows_before = bool(pivot.before) and "task" in pivot.row_axes
    tops = [best_printed({row: cell.value for row, cell in line.cells.items()}, pivot) for line in aside]
    rows = []
    for row in pivot.rows:
        cells = [label(value_name(axis, value)) for axis, value in zip(pivot.row_axes, row, strict=True)]
        cells += [_cell(pivot.cells[row, column], decimals, (row, column) in best) for column in pivot.columns]
        cells += [
            average_cell(line.cells[row], decimals, best=row in top) for line, top in zip(aside, tops, strict=True)
        ]
        cells += (
            [number(pivot.before[row], decimals) if row in pivot.before else SheetCell("-")] if shows_before else []
        )
        rows.append(tuple(cells))
    foot = []
    for line in below:
        first = [label(line.name), *[label("")] * (len(pivot.row_axes) - 1)]
        top = best_printed({column: cell.value for column, cell in line.cells.items()}, pivot)
        cells = [average_cell(line.cells[column], decimals, best=column in top) for column in pivot.columns]
        foot.append((*first, *cells, *([SheetCell("")] if shows_before else [])))
    return Sheet(
        name,
        pivot.title,
        f"{sentence(pivot.measure.title)}; {_what(pivot)}.",
        (
            *(axis_name(axis) for axis in pivot.row_axes),
            *(pivot.column_name(column) for column in pivot.columns),
            *(line.name for line in aside),
            *(["base model"] if shows_before else []),
        ),
        tuple(rows),
        tuple(foot),
        len(pivot.row_axes),
    )


def _what(pivot: Pivot) -> str:
    seeds = pivot.study.study.axes["seed"]
    shown = f"mean ± sample standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    better = f"; {'lower' if pivot.measure.lower_is_better else 'higher'} is better" if pivot.measure.ranked else ""
    return shown + better


def _cell(cell: PivotCell, decimals: int, best: bool) -> SheetCell:
    hint = "; ".join(_run_hint(run, decimals) for run in cell.runs)
    if cell.mean is None:
        counted = f" {cell.num_done}/{len(cell.runs)}" if cell.num_done else ""
        return SheetCell(SHOWN[cell.status] + counted, hint=hint, runs=cell.runs)
    spread = "" if cell.std is None else f"{cell.std:.{decimals}f}"
    return SheetCell(f"{cell.mean:.{decimals}f}", spread, cell.mean, best, hint=hint, runs=cell.runs)


def _run_hint(run: SeedValue, decimals: int) -> str:
    return f"seed {run.seed}: {run.message if run.value is None else f'{run.value:.{decimals}f}'}"


def average_cell(average: Average, decimals: int, *, best: bool = False, second: bool = False) -> SheetCell:
    if average.value is None:
        return SheetCell("n/a", hint=average.reason)
    spread = "" if average.std is None else f"{average.std:.{decimals}f}"
    return SheetCell(f"{average.value:.{decimals}f}", spread, average.value, best, second)


def _best(pivot: Pivot) -> set[tuple[Key, Key]]:
    """The cells that print the best mean of their row, or of their column where the tasks are columns."""
    found = set()
    if over_rows(pivot):
        for row in pivot.rows:
            top = best_printed({column: pivot.cells[row, column].mean for column in pivot.columns}, pivot)
            found |= {(row, column) for column in top}
    else:
        for column in pivot.columns:
            top = best_printed({row: pivot.cells[row, column].mean for row in pivot.rows}, pivot)
            found |= {(row, column) for row in top}
    return found


def best_printed(values: Mapping[Key, float | None], pivot: Pivot) -> set[Key]:
    """What prints the best value; none where there is nothing to choose from."""
    return ranked_printed(values, pivot.measure)[0]


def ranked_printed(values: Mapping[Key, float | None], measure: Measure) -> tuple[set[Key], set[Key]]:
    """What prints the best value, and what prints the second best one where a single one is the best."""
    shown = {key: round(value, measure.decimals) for key, value in values.items() if value is not None}
    if len(shown) < 2 or not measure.ranked:
        return set(), set()
    places = sorted(set(shown.values()), reverse=not measure.lower_is_better)
    best, second = ({key for key, value in shown.items() if value == place} for place in (places[0], places[:2][-1]))
    return best, second if len(best) == 1 else set()
