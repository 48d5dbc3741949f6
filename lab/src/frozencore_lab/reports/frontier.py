"""The section of a report that holds what a trained value buys, over the studies that the campaign names for it."""

from __future__ import annotations

from functools import partial

from frozencore_lab.campaign.results import CampaignResults
from frozencore_lab.reports.document import Drawing, Section, Table
from frozencore_lab.reports.figures.frontier import frontier_panels
from frozencore_lab.reports.tables.frontier import COUNTS, ahead_sheet, frontier_points, frontier_sheet

NAME, TITLE = "frontier", "What a trained value buys"


def frontier_section(results: CampaignResults) -> Section | None:
    """Loss against values at once and in all, as a figure and as tables.

    None where no study is named, or nothing is done yet.
    """
    points = frontier_points(results)
    if not any(point.losses for point in points):
        return None
    runs = tuple(run for study in results.studies if study.name in results.campaign.frontier for run in study.runs)
    drawing = Drawing(
        NAME, f"{TITLE}: held-out loss against values at once and in all", partial(frontier_panels, points), wide=True
    )
    ahead = (ahead_sheet(points, count) for count in COUNTS)
    main = [Table(frontier_sheet(points)), *(Table(sheet) for sheet in ahead if sheet is not None)]
    return Section(NAME, TITLE, "", runs, tuple(main), (), (drawing,))
