"""The sheets of a study: means with averages and differences, the best of a grid, trained values, its search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from frozencore.tune.record import TunedRecord
from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.spec import MATCHED, Value, column_key
from frozencore_lab.reports.pivot import (
    ACCURACY,
    Average,
    Key,
    Pivot,
    PivotCell,
    averages,
    best_printed,
    column_averages,
    row_labels,
)
from frozencore_lab.reports.sheet import (
    SHOWN,
    Sheet,
    SheetCell,
    axis_name,
    full_name,
    label,
    missing,
    number,
    sentence,
    signed,
    value_name,
)
from frozencore_lab.reports.statistics import differences

Extra = dict[str, dict[Key, SheetCell]]
"""Lines of cells by name, beside a table (by its rows) or below it (by its columns)."""


def pivot_sheet(pivot: Pivot, name: str) -> Sheet:
    """Mean ± sample standard deviation over seeds, the best of each task bold, averages and differences below.

    If tasks are columns, averages and differences are at the right.
    """
    upright = pivot.upright
    turned = upright is not pivot
    of_compared: Extra = {}
    for mean in averages(upright):
        values = {key: one.value for key, one in mean.cells.items()}
        best = best_printed(values, pivot.measure) if mean.ranked else set()
        shown = {key: average_cell(one, pivot.measure.decimals, best=key in best) for key, one in mean.cells.items()}
        of_compared[mean.name] = shown
    of_compared |= _differences_by_task(upright, turned=turned)
    beside = of_compared if turned else _named_differences(pivot) | _base_model(pivot)
    below = {} if turned else of_compared
    # a cell in which all runs diverged is never the best, because its 0 is not a measured accuracy
    best_cells = {
        (one, row) if turned else (row, one)
        for row in upright.rows
        for one in best_printed(upright.row_means(row), pivot.measure)
        if any(run.status != "diverged" for run in upright.cells[row, one].runs)
    }
    rows = []
    for row in pivot.rows:
        cells = [pivot_cell(pivot, row, column, best=(row, column) in best_cells) for column in pivot.columns]
        rows.append((*row_labels(pivot, row).values(), *cells, *(extra[row] for extra in beside.values())))
    foot = [
        (
            *[label(name), *[label("")] * (len(pivot.row_axes) - 1)],
            *(extra[column] for column in pivot.columns),
            *[SheetCell("")] * len(beside),
        )
        for name, extra in below.items()
    ]
    headings = (*map(axis_name, pivot.row_axes), *map(pivot.column_name, pivot.columns), *beside)
    note = _note(pivot, differs=any("Δ" in name or "−" in name for name in (*beside, *below)))
    return Sheet(
        name, f"{pivot.title}: {pivot.measure.title}", note, headings, tuple(rows), tuple(foot), len(pivot.row_axes)
    )


def _differences_by_task(pivot: Pivot, *, turned: bool) -> Extra:
    """Lines for tasks as columns, or for a single task, which has no comparison over tasks."""
    if not turned and (len(pivot.rows) > 1 or pivot.report.differences):
        return {}
    found: Extra = {}
    for row in pivot.rows:
        if (reference := _reference(pivot, row)) is not None:
            name = f"Δ from {_name(pivot, reference)}" if len(pivot.rows) == 1 else f"{pivot.row_name(row)}: Δ"
            found[name] = {column: _difference(pivot, row, column, reference) for column in pivot.columns}
    return found


def _named_differences(pivot: Pivot) -> Extra:
    """Lines for the columns that the study names."""
    references = {row: found for row in pivot.rows if (found := _reference(pivot, row)) is not None}
    if len(references) < len(pivot.rows):
        return {}
    return {
        f"{pivot.column_name(column)} − {_name(pivot, references[pivot.rows[0]])}": {
            row: _difference(pivot, row, column, references[row]) for row in pivot.rows
        }
        for column in pivot.columns
        if column_key(column) in pivot.report.differences
    }


def _base_model(pivot: Pivot) -> Extra:
    if not pivot.before or "task" not in pivot.row_axes:
        return {}
    known = {row: number(value, pivot.measure.decimals) for row, value in pivot.before.items()}
    return {"base model": {row: known.get(row, SheetCell("-")) for row in pivot.rows}}


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
    values = {one.seed: one.value for one in base.runs if one.value is not None}
    hint = "; ".join(
        f"seed {one.seed}: {signed(one.value - values[one.seed], decimals).text}"
        for one in cell.runs
        if one.value is not None and one.seed in values
    )
    return signed(differences([cell.mean], [base.mean])[0], decimals, hint=hint)


def _note(pivot: Pivot, *, differs: bool) -> str:
    seeds, measure = pivot.study.study.axes["seed"], pivot.measure
    shown = f"mean ± sample standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    better = f"; {measure.better} is better" if measure.ranked else ""
    found = [f"{sentence(shown)}{better}."]
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
        return SheetCell(SHOWN[cell.status] + counted, hint=hint)
    mark = "†" if cell.status == "diverged" else ""
    return SheetCell(f"{cell.mean:.{decimals}f}{mark}", _spread(cell.std, decimals), cell.mean, best, hint=hint)


def average_cell(average: Average, decimals: int, *, best: bool) -> SheetCell:
    if average.value is None:
        return missing(average.reason)
    return SheetCell(f"{average.value:.{decimals}f}", _spread(average.std, decimals), average.value, best)


def _spread(std: float | None, decimals: int) -> str:
    return "" if std is None else f"{std:.{decimals}f}"


def best_sheet(pivot: Pivot, name: str) -> Sheet:
    """A line for each row: its best mean, the best column, and the outcomes of all runs (paper, table
    "noqr-lr-sweep")."""
    over, lines = ", ".join(map(axis_name, pivot.column_axes)), []
    for row in pivot.rows:
        known = {column: mean for column, mean in pivot.row_means(row).items() if mean is not None}
        first = min if pivot.measure.lower_is_better else max
        best = first(known, key=known.__getitem__) if known else None
        line = row_labels(pivot, row)
        line["best"] = missing("no column is whole") if best is None else pivot_cell(pivot, row, best)
        line["at"] = SheetCell("") if best is None else label(pivot.column_name(best))
        lines.append(line | {"outcome": label("; ".join(_outcomes(pivot, row, best)) or "all runs trained")})
    title = f"{pivot.title}: the best of {over} ({pivot.measure.title})"
    note = f"The best mean over {len(pivot.columns)} values of {over}, and how all their runs ended."
    return Sheet.of(name, title, note, lines, num_labels=len(pivot.row_axes))


def _outcomes(pivot: Pivot, row: Key, best: Key | None) -> Iterator[str]:
    runs = [run for column in pivot.columns for run in pivot.cells[row, column].runs]
    for status in ("diverged", "failed", "missing"):
        count = sum(run.status == status for run in runs)
        if count:
            yield f"all {count} runs {status}" if count == len(runs) else f"{count} of {len(runs)} runs {status}"
    if best is not None and (chance := _no_better_than_chance(pivot, pivot.cells[row, best])) is not None:
        yield f"no better than chance ({100 * chance:.0f} %)"


def _no_better_than_chance(pivot: Pivot, cell: PivotCell) -> float | None:
    """Chance, if the accuracy of trained runs is not more than two standard errors above it; otherwise None."""
    records = [one.run.record for one in cell.runs if isinstance(one.run.record, TunedRecord)]
    known = [(one.score, one.score.chance) for one in records if one.score is not None and one.score.chance is not None]
    if pivot.measure is not ACCURACY or not known or cell.mean is None:
        return None
    chance = known[0][1]
    error = sum(score.standard_error for score, _ in known) / len(known)
    return chance if cell.mean / pivot.measure.scale <= chance + 2 * error else None


def tradeoff_sheet(pivot: Pivot, name: str) -> Sheet:
    """Each column's macro-average, its trained values, and its difference from the reference (paper, table
    "efficiency-state")."""
    pivot = pivot.upright
    means, counts, measure = column_averages(pivot), counted_values(pivot), pivot.measure
    best = best_printed({column: mean.value for column, mean in means.items()}, measure)
    reference, lines = pivot.reference, []
    for column, own in means.items():
        line = {
            ", ".join(map(axis_name, pivot.column_axes)): label(pivot.column_name(column)),
            "mean": average_cell(own, measure.decimals, best=column in best),
            "values": number(counts.get(column), 0, reason="no run is done"),
        }
        if reference is not None:
            base = means[reference]
            if own.value is None or base.value is None:
                gap = missing(own.reason or base.reason)
            else:
                gap = signed(differences([own.value], [base.value])[0], measure.decimals + 1)
            line[f"Δ vs. {pivot.column_name(reference)}"] = SheetCell("reference") if column == reference else gap
        lines.append(line)
    title = f"{pivot.title}: {measure.title.split(',')[0]} and values"
    note = f"{sentence(measure.title)}, macro-average of unrounded task means ± its standard deviation over seeds."
    return Sheet.of(name, title, note, lines)


def counted_values(pivot: Pivot) -> dict[Key, int]:
    """The number of values that each column trains."""
    return {
        column: one.run.record.num_trainable
        for (_, column), cell in pivot.cells.items()
        for one in cell.runs
        if isinstance(one.run.record, TunedRecord)
    }


def search_sheet(results: StudyResults) -> Sheet:
    """The choice of the search for each group, with every trial's validation score."""
    search = results.study.search
    assert search is not None
    scale, decimals = (100, 1) if search.select == "accuracy" else (1, 3)

    def shown(options: Mapping[str, Value], score: float | None) -> str:
        return f"{_options(options)}: {'failed' if score is None else f'{scale * score:.{decimals}f}'}"

    known = results.choices[0][0]
    axes = [axis for axis in known if len(results.study.axes.get(axis, ())) > 1]
    axes = axes or ["method" if "method" in known else "task"]
    lines = []
    for group, choice in results.choices:
        score = next(score for options, score in choice.trials if options == choice.options)
        lines.append({
            **{axis_name(axis): label(value_name(axis, group[axis])) for axis in axes},
            "chosen": label(_options(choice.options) + " †" * (choice.beyond is not None)),
            "score": number(None if score is None else scale * score, decimals),
            "all trials": label("; ".join(shown(*trial) for trial in choice.trials)),
        })  # fmt: skip
    measure = "accuracy, %" if search.select == "accuracy" else "held-out loss, nats per token"
    note = f"On held-out validation rows with seed {search.seed}, once for all seeds; {measure}."
    if any(choice.beyond is not None for _, choice in results.choices):
        note += " †: the largest or the smallest learning rate that was tried, so a better one may lie beyond it."
    title = f"{results.study.title}: what the search chose"
    return Sheet.of(f"{results.name}-search", title, note, lines, num_labels=len(axes) + 1)


def _options(options: Mapping[str, Value]) -> str:
    return ", ".join(full_name(axis, value) for axis, value in options.items()) or "as given"
