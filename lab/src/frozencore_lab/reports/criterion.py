"""The section of a report that holds the criterion against the outcome."""

from __future__ import annotations

from functools import partial

from frozencore_lab.campaign.results import CampaignResults
from frozencore_lab.reports.document import Drawing, Section, Table
from frozencore_lab.reports.figures.criterion import correlation_intervals, criterion_scatter
from frozencore_lab.reports.tables.criterion import (
    by_study_sheet,
    by_task_sheet,
    criterion_points,
    criterion_sheet,
    why_without,
)

NAME, TITLE = "criterion", "Criterion against outcome"


def criterion_section(results: CampaignResults) -> Section | None:
    """Correlations of what the bases capture with loss and accuracy; None where no run has bases.

    Where no run with bases was measured, the section says why and holds nothing else.
    """
    runs = tuple(run for study in results.studies for run in study.runs)
    points = criterion_points(runs)
    if not points:
        why = why_without(runs)
        return Section(NAME, TITLE, f"Left out: {why}.", (), ()) if why else None
    main = criterion_sheet(points)
    details = [by_task_sheet(points, "held-out loss", "-loss")]
    if any(point.outcomes["accuracy"] is not None for point in points):
        details.append(by_task_sheet(points, "accuracy", "-accuracy"))
    if len(results.studies) > 1:
        details.append(by_study_sheet(results))
    drawings = [
        Drawing(
            f"{NAME}-points", f"{TITLE}: held-out loss by captured share", partial(criterion_scatter, points), wide=True
        )
    ]
    if any(cell.value is not None for line in main.rows for cell in line[1:-1]):
        drawings.insert(0, Drawing(NAME, f"{TITLE}: correlations", partial(correlation_intervals, points)))
    return Section(NAME, TITLE, "", (), (Table(main),), tuple(map(Table, details)), tuple(drawings))
