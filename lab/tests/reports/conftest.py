"""Campaigns whose records are made up, so that what a report says of them is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from frozencore.tune.record import Failure, read_record
from frozencore_lab.campaign.plan import Choice
from frozencore_lab.campaign.results import CampaignResults, FinalRun, StudyResults
from frozencore_lab.campaign.spec import Campaign, read_campaign
from made_up import record_content

MakeCampaign = Callable[[str], Campaign]
MakeStudy = Callable[..., StudyResults]
Content = dict[str, Any]
"""The JSON of a record, or of a failure, which has a reason."""


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Content]:
    return record_content


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> MakeCampaign:
    """A campaign from the YAML of its studies."""

    def make(studies: str) -> Campaign:
        file = tmp_path_factory.mktemp("campaign") / "campaign.yaml"
        file.write_text("name: made-up\nmodels: {small: pocket, large: pocket}\nstudies:\n" + studies)
        return read_campaign(file)

    return make


@pytest.fixture(scope="session")
def study(campaign: MakeCampaign) -> MakeStudy:
    """The results of one study: ``record(axes)`` gives a record, a failure (with a reason), or None."""

    def make(
        yaml: str,
        record: Callable[[Mapping[str, Any]], Content | None] = record_content,
        choices: tuple[tuple[dict[str, Any], Choice], ...] = (),
    ) -> StudyResults:
        made = campaign(yaml)
        name, only = next(iter(made.studies.items()))
        return StudyResults(name, only, tuple(runs_of(name, only.axes, record)), choices)

    return make


def runs_of(
    study: str, axes: Mapping[str, Any], record: Callable[[Mapping[str, Any]], Content | None]
) -> list[FinalRun]:
    """The runs of a study; every run has an id of its own."""
    found: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        found = [{**before, name: value} for before in found for value in values]
    runs = []
    for values in found:
        came = record(values)
        run_id = hashlib.sha256(f"{study} {values}".encode()).hexdigest()[:16]
        if came is None:
            runs.append(FinalRun(values, run_id, None, None))
        elif "reason" in came:
            runs.append(FinalRun(values, run_id, None, Failure(**came)))
        else:
            runs.append(FinalRun(values, run_id, read_record(json.dumps({"format": 1, **came})), None))
    return runs


@pytest.fixture(scope="session")
def results(campaign: MakeCampaign) -> Callable[..., CampaignResults]:
    """The results of a campaign from the YAML of its studies."""

    def make(yaml: str, record: Callable[[Mapping[str, Any]], Content | None] = record_content) -> CampaignResults:
        made = campaign(yaml)
        studies = (
            StudyResults(name, one, tuple(runs_of(name, one.axes, record)), ()) for name, one in made.studies.items()
        )
        return CampaignResults(made, tuple(studies))

    return make
