"""A pivot as a sheet: means over seeds with their spread, the best marked, macro-averages beside or below."""

from __future__ import annotations

from collections.abc import Mapping

from frozencore_lab.reports.labels import axis_name, value_name
from frozencore_lab.reports.sheets.sheet import SHOWN, SeedValue, Sheet, SheetCell, label, number, sentence
from frozencore_lab.reports.tables.averages import Average, averages, over_rows
from frozencore_lab.reports.tables.differences import ExtraLine, differences_below, differences_beside
from frozencore_lab.reports.tables.measures import Measure
from frozencore_lab.reports.tables.pivot import Key, Pivot, PivotCell


def pivot_sheet(pivot: Pivot, name: str) -> Sheet:
    """Mean ± sample standard deviation over seeds, the best of each row bold, averages and differences below or beside.

    Where the tasks are columns, the best of each column is bold and the averages stand at the right.
    """
    best, beside, below = _best(pivot), _beside(pivot), _below(pivot)
    rows = []
    for row in pivot.rows:
        labels = [label(value_name(axis, value)) for axis, value in zip(pivot.row_axes, row, strict=True)]
        cells = [
            pivot_cell(pivot.cells[row, column], pivot.measure.decimals, best=(row, column) in best)
            for column in pivot.columns
        ]
        rows.append((*labels, *cells, *(line.cells[row] for line in beside)))
    foot = [
        (
            *[label(line.name), *[label("")] * (len(pivot.row_axes) - 1)],
            *(line.cells[column] for column in pivot.columns),
            *[SheetCell("")] * len(beside),
        )
        for line in below
    ]
    return Sheet(
        name,
        pivot.title,
        _note(pivot, differs=any("Δ" in line.name or "−" in line.name for line in (*beside, *below))),
        (
            *(axis_name(axis) for axis in pivot.row_axes),
            *(pivot.column_name(column) for column in pivot.columns),
            *(line.name for line in beside),
        ),
        tuple(rows),
        tuple(foot),
        len(pivot.row_axes),
    )


def _beside(pivot: Pivot) -> list[ExtraLine]:
    """Averages where the tasks are columns, differences, and the untouched model's values."""
    lines = [] if over_rows(pivot) else _average_lines(pivot)
    lines += differences_beside(pivot)
    if pivot.before and "task" in pivot.row_axes:
        known = {row: number(value, pivot.measure.decimals) for row, value in pivot.before.items()}
        lines.append(ExtraLine("base model", {row: known.get(row, SheetCell("-")) for row in pivot.rows}))
    return lines


def _below(pivot: Pivot) -> list[ExtraLine]:
    """Averages where the tasks are rows, and the differences of a single one."""
    lines = _average_lines(pivot) if over_rows(pivot) else []
    single = differences_below(pivot)
    return lines if single is None else [*lines, single]


def _average_lines(pivot: Pivot) -> list[ExtraLine]:
    lines = []
    for line in averages(pivot):
        values = {key: cell.value for key, cell in line.cells.items()}
        top = best_printed(values, pivot) if line.ranked else set()
        cells = {key: average_cell(cell, pivot.measure.decimals, best=key in top) for key, cell in line.cells.items()}
        lines.append(ExtraLine(line.name, cells))
    return lines


def _note(pivot: Pivot, *, differs: bool) -> str:
    found = [f"{sentence(pivot.measure.title)}; {_what(pivot)}."]
    if differs:
        found.append("Differences are of unrounded means: the value less the reference's.")
    runs = [run for cell in pivot.cells.values() for run in cell.runs]
    zero = sum(run.status == "diverged" and run.value is not None for run in runs)
    if zero:
        counted = f"{pivot.measure.diverged:.{pivot.measure.decimals}f}"
        found.append(f"† {zero} of {len(runs)} runs diverged and count as {counted}.")
    return " ".join(found)


def _what(pivot: Pivot) -> str:
    seeds = pivot.study.study.axes["seed"]
    shown = f"mean ± sample standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    better = f"; {'lower' if pivot.measure.lower_is_better else 'higher'} is better" if pivot.measure.ranked else ""
    return shown + better


def pivot_cell(cell: PivotCell, decimals: int, *, best: bool = False) -> SheetCell:
    """Mean ± standard deviation, or why there is none; a dagger where a run that diverged is counted."""
    hint = "; ".join(_run_hint(run, decimals) for run in cell.runs)
    if cell.mean is None:
        counted = f" {cell.num_done}/{len(cell.runs)}" if cell.num_done else ""
        return SheetCell(SHOWN[cell.status] + counted, hint=hint, runs=cell.runs)
    spread = "" if cell.std is None else f"{cell.std:.{decimals}f}"
    mark = "†" if cell.status == "diverged" else ""
    return SheetCell(f"{cell.mean:.{decimals}f}{mark}", spread, cell.mean, best, hint=hint, runs=cell.runs)


def _run_hint(run: SeedValue, decimals: int) -> str:
    if run.value is None:
        return f"seed {run.seed}: {run.message}"
    return f"seed {run.seed}: {run.value:.{decimals}f}" + (f" ({run.message})" if run.message else "")


def average_cell(average: Average, decimals: int, *, best: bool = False, second: bool = False) -> SheetCell:
    if average.value is None:
        return SheetCell("n/a", hint=average.reason)
    spread = "" if average.std is None else f"{average.std:.{decimals}f}"
    return SheetCell(f"{average.value:.{decimals}f}", spread, average.value, best, second)


def _best(pivot: Pivot) -> set[tuple[Key, Key]]:
    """The cells that print the best mean of their row, or of their column where the tasks are columns.

    A cell all of whose runs diverged is never the best: its 0 is no accuracy.
    """
    found = set()
    if over_rows(pivot):
        for row in pivot.rows:
            top = best_printed({column: pivot.cells[row, column].mean for column in pivot.columns}, pivot)
            found |= {(row, column) for column in top}
    else:
        for column in pivot.columns:
            top = best_printed({row: pivot.cells[row, column].mean for row in pivot.rows}, pivot)
            found |= {(row, column) for row in top}
    return {place for place in found if any(run.status != "diverged" for run in pivot.cells[place].runs)}


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
