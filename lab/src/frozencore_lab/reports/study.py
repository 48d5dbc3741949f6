"""Everything that a study shows, from its results: tables, comparisons, costs, what its search chose, its figure."""

from __future__ import annotations

from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.document import Section, Table
from frozencore_lab.reports.figures.study import study_drawings
from frozencore_lab.reports.labels import axis_name, slug, value_name
from frozencore_lab.reports.sheets.sheet import Sheet
from frozencore_lab.reports.tables.best_of_grid import best_sheet
from frozencore_lab.reports.tables.comparison import Comparison
from frozencore_lab.reports.tables.items import item_gains, item_sheet, items_by_task_sheet
from frozencore_lab.reports.tables.means_across import NamedPivot, means_across
from frozencore_lab.reports.tables.measures import measures_of
from frozencore_lab.reports.tables.pivot import Pivot, pivots
from frozencore_lab.reports.tables.pivot_sheet import pivot_sheet
from frozencore_lab.reports.tables.resource_sheets import memory_sheet, state_sheet, time_sheet
from frozencore_lab.reports.tables.resources import study_costs
from frozencore_lab.reports.tables.search import search_sheet
from frozencore_lab.reports.tables.significance import compare, comparison_sheet
from frozencore_lab.reports.tables.tradeoff import tradeoff_sheet


def study_section(results: StudyResults) -> Section:
    """Every table and figure of a study."""
    main: list[Table] = []
    details: list[Table] = []
    for i, measure in enumerate(measures_of(results)):
        first = main if i == 0 or not results.study.kind.trains else details
        tables = pivots(results, measure)
        for pivot in tables:
            name = pivot.name + measure.suffix
            comparison, remark = compare(pivot)
            first.append(Table(pivot_sheet(pivot, name), pivot, "" if comparison else remark))
            if "state" in results.study.report.figures:
                first.append(Table(tradeoff_sheet(pivot, f"{name}-tradeoff")))
            if results.study.report.best:
                first.append(Table(best_sheet(pivot, f"{name}-best")))
            gains, absent = item_gains(pivot)
            if comparison is not None:
                sheet = _significance(pivot, comparison, f"{name}-significance", remark)
                first.append(Table(sheet, remark=absent))
            if gains is not None:
                first.append(Table(item_sheet(pivot, gains, comparison, f"{name}-items")))
                details.append(Table(items_by_task_sheet(pivot, gains, f"{name}-items-by-task")))
        named = [NamedPivot(tuple(value_name(*item) for item in pivot.group.items()), pivot) for pivot in tables]
        headings = [axis_name(axis) for axis in tables[0].group]
        across = means_across(named, headings, f"{results.name}-means{measure.suffix}", results.study.title)
        if across is not None:
            first.append(Table(across))
    for costs in study_costs(results):
        name, title, alone = f"{results.name}{slug(costs.group)}", results.study.title, results.study.kind.is_alone
        sheets = [state_sheet(costs, f"{name}-state", title), time_sheet(costs, f"{name}-time", title, alone=alone)]
        if alone and (memory := memory_sheet(costs, f"{name}-memory", title)) is not None:
            sheets.append(memory)
        (main if alone else details).extend(map(Table, sheets))
    if results.choices:
        details.append(Table(search_sheet(results)))
    drawings = tuple(study_drawings(results))
    study = results.study
    return Section(results.name, study.title, study.note, results.runs, tuple(main), tuple(details), drawings)


def _significance(pivot: Pivot, comparison: Comparison, name: str, remark: str) -> Sheet:
    names = {column_key(column): pivot.column_name(column) for column in pivot.columns}
    title, decimals = f"{pivot.title}: significance", pivot.measure.decimals + 1
    return comparison_sheet(comparison, name=name, title=title, note=remark, decimals=decimals, names=names)
