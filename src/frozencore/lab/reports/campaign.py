"""The report of a campaign, whole from its records."""

from __future__ import annotations

from pathlib import Path

from frozencore.lab.campaign.results import CampaignResults
from frozencore.lab.reports.document import Document, make_document
from frozencore.lab.reports.study import study_section
from frozencore.lab.reports.writing import write_document


def campaign_document(results: CampaignResults) -> Document:
    """The report before it is files: a section a study."""
    campaign = results.campaign
    return make_document(campaign.name, campaign.about, (results,), map(study_section, results.studies))


def write_report(results: CampaignResults, folder: Path) -> list[Path]:
    """Write ``tables/*.md``, ``*.tex`` and ``*.csv``, ``figures/*.png``, ``report.md`` and ``index.html``.

    A table of a study has its unrounded means in ``NAME.csv``, which ``campaign report --table`` reads, and each of its
    runs in ``NAME.runs.csv``. The same records give the same bytes.

    Raises:
        ArtifactError: The folder cannot be written.
    """
    return write_document(campaign_document(results), folder)
