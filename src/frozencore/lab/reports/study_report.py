"""Everything that a study shows, from its results: tables, comparisons, costs, what its search chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frozencore.lab.campaign.results import Cell, StudyResults
from frozencore.lab.campaign.spec import Value
from frozencore.lab.reports.averages import averages, over_rows
from frozencore.lab.reports.comparison import Comparison
from frozencore.lab.reports.labels import axis_name, full_name, slug, value_name
from frozencore.lab.reports.measures import measures_of
from frozencore.lab.reports.pivot import Pivot, column_key, pivots
from frozencore.lab.reports.resource_sheets import state_sheet, time_sheet
from frozencore.lab.reports.resources import study_costs
from frozencore.lab.reports.sheet import Sheet, average_cell, best_printed, label, number, pivot_sheet, sentence
from frozencore.lab.reports.significance import compare, comparison_sheet


@dataclass(frozen=True)
class Table:
    """A sheet, the pivot that it shows if any, and a remark to stand below it."""

    sheet: Sheet
    pivot: Pivot | None = None
    remark: str = ""


@dataclass(frozen=True)
class StudyReport:
    """The tables of a study in the order of reading: ``main`` ones, then the details."""

    results: StudyResults
    main: tuple[Table, ...]
    details: tuple[Table, ...]

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.main + self.details


@dataclass(frozen=True)
class Tally:
    """Runs that are done, failed, and missing; a run that several studies ask for counts once."""

    done: int
    failed: int
    missing: int

    def __str__(self) -> str:
        total = self.done + self.failed + self.missing
        return f"{self.done} of {total} final runs done, {self.failed} failed, {self.missing} missing"


def tally(cells: tuple[Cell, ...]) -> Tally:
    """Count the runs of some cells."""
    runs = {cell.run_id or f"none {i}": cell for i, cell in enumerate(cells)}.values()
    done = sum(cell.record is not None for cell in runs)
    failed = sum(cell.record is None and cell.failure is not None for cell in runs)
    return Tally(done, failed, len(runs) - done - failed)


def study_report(results: StudyResults) -> StudyReport:
    """Make every table of a study."""
    main: list[Table] = []
    details: list[Table] = []
    for i, measure in enumerate(measures_of(results)):
        first = main if i == 0 or results.study.kind == "stability" else details
        tables = pivots(results, measure)
        for pivot in tables:
            name = pivot.name + measure.suffix
            comparison, remark = compare(pivot)
            first.append(Table(pivot_sheet(pivot, name), pivot, "" if comparison else remark))
            if comparison is not None:
                first.append(Table(_significance(pivot, comparison, f"{name}-significance", remark)))
        if (across := _across_groups(tables, f"{results.name}-means{measure.suffix}")) is not None:
            first.append(Table(across))
    for costs in study_costs(results):
        name, title, alone = f"{results.name}{slug(costs.group)}", results.study.title, results.study.kind == "profile"
        sheets = state_sheet(costs, f"{name}-state", title), time_sheet(costs, f"{name}-time", title, alone=alone)
        (main if alone else details).extend(map(Table, sheets))
    if results.choices:
        details.append(Table(_search_sheet(results)))
    return StudyReport(results, tuple(main), tuple(details))


def _significance(pivot: Pivot, comparison: Comparison, name: str, remark: str) -> Sheet:
    names = {column_key(column): pivot.column_name(column) for column in pivot.columns}
    title, decimals = f"{pivot.title}: significance", pivot.measure.decimals + 1
    return comparison_sheet(comparison, name=name, title=title, note=remark, decimals=decimals, names=names)


def _across_groups(tables: list[Pivot], name: str) -> Sheet | None:
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


def _search_sheet(results: StudyResults) -> Sheet:
    """What the search chose for each group, with every trial's score on the validation rows."""
    search = results.study.search
    assert search is not None
    by_accuracy = search.select == "accuracy"
    axes = [axis for axis in results.choices[0][0] if len(results.study.axes.get(axis, ())) > 1] or ["method"]
    rows = []
    for group, choice in results.choices:
        scores = [score for options, score in choice.trials if options == choice.options]
        trials = "; ".join(f"{_options(options)}: {_score(score, by_accuracy)}" for options, score in choice.trials)
        rows.append((
            *(label(value_name(axis, group[axis])) for axis in axes), label(_options(choice.options)),
            number(None if scores[0] is None else (100 if by_accuracy else 1) * scores[0], 1 if by_accuracy else 3),
            label(trials),
        ))  # fmt: skip
    measure = "accuracy, %" if by_accuracy else "held-out loss, nats per token"
    return Sheet(
        f"{results.name}-search", f"{results.study.title}: what the search chose",
        f"On held-out validation rows with seed {search.seed}, once for all seeds; {measure}.",
        (*map(axis_name, axes), "chosen", "score", "all trials"), tuple(rows), num_labels=len(axes) + 1,
    )  # fmt: skip


def _score(score: float | None, by_accuracy: bool) -> str:
    return "failed" if score is None else f"{100 * score:.1f}" if by_accuracy else f"{score:.3f}"


def _options(options: Mapping[str, Value]) -> str:
    return ", ".join(full_name(axis, value) for axis, value in options.items()) or "as given"
