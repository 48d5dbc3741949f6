"""Make the report of a campaign from its records: a section for each study, and common sections."""

from __future__ import annotations

from collections.abc import Iterator

from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.reports.document import Document, Section, Table, make_document
from frozencore_lab.reports.figures import study_drawings
from frozencore_lab.reports.labels import slug
from frozencore_lab.reports.tables.averages import averages, column_averages
from frozencore_lab.reports.tables.costs import memory_sheet, state_sheet, study_costs, time_sheet
from frozencore_lab.reports.tables.further import FURTHER, search_sheet
from frozencore_lab.reports.tables.pivot import Pivot, measures_of, pivots
from frozencore_lab.reports.tables.pivot_sheet import pivot_sheet
from frozencore_lab.reports.tables.setup import data_sheet, hyper_parameter_sheet, information_sheet
from frozencore_lab.reports.tables.significance import compare, comparison_sheet, differences_sheet, names_of


def campaign_document(results: CampaignResults) -> Document:
    """Make the report as a document: the studies and the setup."""
    return make_document(results, [*map(study_section, results.studies), setup_section(results)])


def setup_section(results: CampaignResults) -> Section:
    """Describe the setup from the code: data sets, options, and the inputs of constructors."""
    campaign = results.campaign
    sheets = (data_sheet(campaign), hyper_parameter_sheet(results), information_sheet(campaign))
    return Section("set-up", "Set-up", "", (), tuple(Table(sheet) for sheet in sheets if sheet is not None))


def study_section(results: StudyResults) -> Section:
    """Make the section of a study: tables, comparisons, costs, choices of its search, figures."""
    main: list[Table] = []
    details: list[Table] = []
    headlines: list[str] = []
    study = results.study
    for i, measure in enumerate(measures_of(results)):
        first = details if i and measure.ranked else main
        for pivot in pivots(results, measure):
            first += _pivot_tables(pivot, pivot.name + measure.suffix)
            headlines += [] if i else _headline(pivot)
            if (apart := differences_sheet(pivot, f"{pivot.name}{measure.suffix}-differences")) is not None:
                (first if len(pivot.rows) == 1 and not study.kind.is_alone else details).append(Table(apart))
    for costs in study_costs(results):
        name, alone = f"{results.name}{slug(costs.group)}", study.kind.is_alone
        memory = memory_sheet(costs, f"{name}-memory") if alone else None
        sheets = (state_sheet(costs, f"{name}-state"), time_sheet(costs, f"{name}-time", alone=alone), memory)
        (main if alone else details).extend(Table(sheet) for sheet in sheets if sheet is not None)
    if results.choices:
        details.append(Table(search_sheet(results)))
    drawings = tuple(study_drawings(results))
    return Section(
        results.name, study.title, study.note, results.runs, tuple(main), tuple(details), drawings, tuple(headlines)
    )


def _pivot_tables(pivot: Pivot, name: str) -> list[Table]:
    """A pivot's own table, further ones, and its comparison with the reference."""
    comparison, remark = compare(pivot)
    tables = [Table(pivot_sheet(pivot, name), pivot, "" if comparison else remark)]
    tables += [Table(kind.sheet(pivot, f"{name}-{end}")) for end, kind in FURTHER.items() if kind.asked(pivot.report)]
    if comparison is not None:
        sheet = comparison_sheet(
            comparison, name=f"{name}-significance", title=f"{pivot.title}: significance", note=remark,
            decimals=pivot.measure.decimals + 1, names=names_of(pivot),
        )  # fmt: skip
        tables.append(Table(sheet))
    return tables


def _headline(pivot: Pivot) -> Iterator[str]:
    """Name the columns with the best and the second best mean over the tasks, with standard deviations over seeds.

    A table of one task has its values in place of means.
    """
    upright, measure = pivot.upright, pivot.measure
    lines, of = averages(upright), "mean over the tasks"
    cells = lines[0].cells if lines else {}
    if len(upright.rows) == 1:
        cells, of = column_averages(upright), upright.row_name(upright.rows[0])
    values = {column: one.value for column, one in cells.items() if one.value is not None}
    if not measure.ranked or len(values) < 2:
        return
    first, second, *_ = sorted(values, key=lambda column: values[column], reverse=not measure.lower_is_better)
    best, next_one = (
        f"{upright.column_name(one)} {values[one]:.{measure.decimals}f}"
        + ("" if cells[one].std is None else f" ± {cells[one].std:.{measure.decimals}f}")
        for one in (first, second)
    )
    yield f"{pivot.title}: {best}, then {next_one} ({measure.title}, {of})."
