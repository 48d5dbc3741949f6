"""Further tables of a study: the best of a grid, accuracy beside trained values, the choices of its search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from frozencore.tune.run.record import TunedRecord
from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.spec import Report
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.reports.labels import axis_name, full_name, sentence, value_name
from frozencore_lab.reports.sheet import Sheet, SheetCell, label, missing, number, signed
from frozencore_lab.reports.statistics import differences
from frozencore_lab.reports.tables.averages import column_averages, ranked_printed
from frozencore_lab.reports.tables.pivot import ACCURACY, Key, Pivot, PivotCell
from frozencore_lab.reports.tables.pivot_sheet import average_cell, pivot_cell

AT_END = "†"
SAID_OF_END = f"{AT_END}: the largest or the smallest learning rate that was tried, so a better one may lie beyond it."


def best_sheet(pivot: Pivot, name: str) -> Sheet:
    """A line for each row: its best mean, the best column, and the outcomes of all runs (paper, table
    "noqr-lr-sweep")."""
    over, lines = ", ".join(map(axis_name, pivot.column_axes)), []
    for row in pivot.rows:
        best = _best(pivot, row)
        line = {
            axis_name(axis): label(value_name(axis, value)) for axis, value in zip(pivot.row_axes, row, strict=True)
        }
        line["best"] = missing("no column is whole") if best is None else pivot_cell(pivot, row, best)
        line["at"] = SheetCell("") if best is None else label(pivot.column_name(best))
        lines.append(line | {"outcome": label("; ".join(_outcomes(pivot, row, best)) or "all runs trained")})
    note = (
        f"{sentence(pivot.measure.title)}; the best mean over {len(pivot.columns)} values of {over}, and how all their "
        "runs ended."
    )
    return Sheet.of(name, f"{pivot.title}: the best of {over}", note, lines, num_labels=len(pivot.row_axes))


def _best(pivot: Pivot, row: Key) -> Key | None:
    """The column with the best mean, the first of equal ones."""
    sign = -1 if pivot.measure.lower_is_better else 1
    known = {column: sign * mean for column, mean in pivot.row_means(row).items() if mean is not None}
    return max(known, key=lambda column: known[column]) if known else None


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
    means, counts, measure = column_averages(pivot), counted_values(pivot), pivot.measure
    best = ranked_printed({column: mean.value for column, mean in means.items()}, measure)[0]
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
        column: one.run.record.values_at_once
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
            "chosen": label(_options(choice.options) + f" {AT_END}" * choice.at_end),
            "score": number(None if score is None else scale * score, decimals),
            "all trials": label("; ".join(shown(*trial) for trial in choice.trials)),
        })  # fmt: skip
    said = f" {SAID_OF_END}" * any(choice.at_end for _, choice in results.choices)
    measure = "accuracy, %" if search.select == "accuracy" else "held-out loss, nats per token"
    note = f"On held-out validation rows with seed {search.seed}, once for all seeds; {measure}.{said}"
    title = f"{results.study.title}: what the search chose"
    return Sheet.of(f"{results.name}-search", title, note, lines, num_labels=len(axes) + 1)


def _options(options: Mapping[str, Value]) -> str:
    return ", ".join(full_name(axis, value) for axis, value in options.items()) or "as given"


class FurtherTable(NamedTuple):
    """A table below a table of means, if the study's report requests it."""

    asked: Callable[[Report], bool]
    sheet: Callable[[Pivot, str], Sheet]


FURTHER = {
    "tradeoff": FurtherTable(lambda report: "state" in report.figures, tradeoff_sheet),
    "best": FurtherTable(lambda report: report.best, best_sheet),
}
"""Tables by the suffix of their files' names."""
