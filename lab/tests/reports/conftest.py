"""Campaigns whose records are made up, so that what a report says of them is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import pytest

from frozencore.tune.record import Failure, read_record
from frozencore_lab.campaign.plan import Choice
from frozencore_lab.campaign.results import CampaignResults, FinalRun, StudyResults
from frozencore_lab.campaign.spec import Campaign, read_campaign
from small_runs import record_content

Content = dict[str, Any]
"""The JSON of a record, or of a failure, which has a reason."""
MakeContent = Callable[[Mapping[str, Any]], Content | None]


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Campaign]:
    """A campaign from the YAML of its studies."""

    def make(studies: str) -> Campaign:
        file = tmp_path_factory.mktemp("campaign") / "campaign.yaml"
        file.write_text("name: made-up\nmodels: {small: pocket, large: pocket}\nstudies:\n" + studies)
        return read_campaign(file)

    return make


@pytest.fixture(scope="session")
def results(campaign: Callable[[str], Campaign]) -> Callable[..., CampaignResults]:
    """The results of a campaign: ``record(axes)`` gives a record, a failure (with a reason), or None."""

    def make(
        yaml: str, record: MakeContent = record_content, choices: tuple[tuple[dict[str, Any], Choice], ...] = ()
    ) -> CampaignResults:
        made = campaign(yaml)
        studies = (
            StudyResults(name, one, tuple(runs_of(name, one.axes, record)), choices)
            for name, one in made.studies.items()
        )
        return CampaignResults(made, tuple(studies))

    return make


@pytest.fixture(scope="session")
def study(results: Callable[..., CampaignResults]) -> Callable[..., StudyResults]:
    """The results of a campaign's only study."""
    return lambda yaml, *made: results(yaml, *made).studies[0]


def runs_of(study: str, axes: Mapping[str, Any], record: MakeContent) -> Iterator[FinalRun]:
    """The runs of a study; every run has an id of its own."""
    for values in (dict(zip(axes, combination, strict=True)) for combination in product(*axes.values())):
        came, run_id = record(values), hashlib.sha256(f"{study} {values}".encode()).hexdigest()[:16]
        failure = Failure(**came) if came and "reason" in came else None
        done = read_record(json.dumps({"format": 1, **came})) if came and not failure else None
        yield FinalRun(values, run_id, done, failure)
