"""Every table and figure of the paper has its counterpart in the report of a shipped campaign."""

from __future__ import annotations

import re
from functools import cache

import pytest

from counterparts import Counterpart, counterparts
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.reports.across import across_document
from frozencore_lab.reports.campaign import campaign_document
from frozencore_lab.reports.writing import file_names
from made_up import TRAINED, criterion_content, record_content
from places import LAB, SHARED

PAPER = SHARED / "paper" / "fcca.tex"
LINES = counterparts()


@pytest.fixture(scope="module")
def written(made_runs):
    """The files of the report on one campaign, or on several together, all of whose runs are done."""

    def record(axes):
        compared = "calibration_size" in axes and "method" not in axes
        if compared:
            return {"config": {}, "cosine_P": 0.9, "cosine_Q": 0.9}
        made = record_content(axes)
        return made | {"criterion": None if axes.get("method") in TRAINED else criterion_content(made["accuracy"])}

    @cache
    def results(name: str) -> CampaignResults:
        campaign = read_campaign(LAB / "campaigns" / f"{name}.yaml")
        studies = (
            StudyResults(key, study, tuple(made_runs(key, study.axes, record)), ())
            for key, study in campaign.studies.items()
        )
        return CampaignResults(campaign, tuple(studies))

    @cache
    def files(names: tuple[str, ...]) -> set[str]:
        made = [results(name) for name in names]
        return set(file_names(campaign_document(made[0]) if len(made) == 1 else across_document(made)))

    return files


@pytest.mark.parametrize("line", [line for line in LINES if line.campaigns], ids=lambda line: line.label)
def test_the_files_that_the_page_names_are_among_those_that_a_report_writes(line: Counterpart, written) -> None:
    assert line.files
    assert set(line.files) <= written(line.campaigns)


def test_the_page_names_each_table_and_figure_of_the_paper_once() -> None:
    labels = [line.label for line in LINES if not line.label.startswith("text:")]
    assert len(labels) == len(set(labels)) == 26
    assert [line.label for line in LINES if not line.campaigns] == ["fig:method"]
    if PAPER.exists():  # beside a checkout, not in it
        found = re.findall(r"\\label\{((?:tab|fig):[^}]+)\}", PAPER.read_text(encoding="utf-8"))
        panels = re.compile(r"fig:(method-(design|pipeline)|(scale-overview|mechanism)-[a-d])")
        assert sorted(labels) == sorted(label for label in found if not panels.fullmatch(label))
