"""The report of a campaign, whole from its records."""

from __future__ import annotations

from pathlib import Path

from frozencore_lab.campaign.results import CampaignResults
from frozencore_lab.reports.criterion import criterion_section
from frozencore_lab.reports.document import Document, Section, Table, make_document
from frozencore_lab.reports.frontier import frontier_section
from frozencore_lab.reports.study import study_section
from frozencore_lab.reports.tables.data_sets import data_sheet
from frozencore_lab.reports.tables.hyper_parameters import hyper_parameter_sheet
from frozencore_lab.reports.tables.information import information_sheet
from frozencore_lab.reports.writing import write_document


def campaign_document(results: CampaignResults) -> Document:
    """The report before it is files: what a trained value buys, a section a study, what the criterion was worth, what
    the runs are made of."""
    campaign = results.campaign
    sections = [
        frontier_section(results),
        *map(study_section, results.studies),
        criterion_section(results),
        setup_section(results),
    ]
    found = [section for section in sections if section is not None]
    return make_document(campaign.name, campaign.about, (results,), found)


def setup_section(results: CampaignResults) -> Section:
    """What the runs are made of, from the code: data sets, options, what constructors look at."""
    sheets = (
        data_sheet(results.campaign),
        hyper_parameter_sheet(results),
        information_sheet(results.campaign),
    )
    return Section("set-up", "Set-up", "", (), tuple(Table(sheet) for sheet in sheets if sheet is not None))


def write_report(results: CampaignResults, folder: Path) -> list[Path]:
    """Write ``tables/*.md``, ``*.tex`` and ``*.csv``, ``figures/*.png``, ``report.md`` and ``index.html``.

    A table of a study has its unrounded means in ``NAME.csv``, which ``campaign report --table`` reads, and each of its
    runs in ``NAME.runs.csv``. The same records give the same bytes.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    return write_document(campaign_document(results), folder)
