"""Campaigns whose records are made up, so that what a report says of them is known."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from frozencore.lab.campaign.plan import Choice, Record
from frozencore.lab.campaign.results import CampaignResults, Cell, StudyResults
from frozencore.lab.campaign.spec import Campaign, read_campaign

MakeCampaign = Callable[[str], Campaign]
MakeStudy = Callable[..., StudyResults]
TRAINED = {"lora": 7_372_800, "dora": 7_538_688, "pissa": 7_372_800}


def made_up_record(axes: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A record as ``frozencore.lab.run.execute.execute`` returns it; its values depend on the axes alone."""
    draw = random.Random(repr(sorted(axes.items(), key=str)))
    method = str(axes.get("method", "fcca"))
    accuracy, trained = 0.6 + 0.3 * draw.random(), TRAINED.get(method, 36_864)
    return {
        "config": {"model": "somewhere/model", "task": axes["task"], "method": method, "rank": 16, "core": {}},
        "task": axes["task"],
        "method": method,
        "seed": axes["seed"],
        "accuracy": accuracy,
        "accuracy_before": 0.5,
        "score": {"standard_error": 0.02, "chance": 0.5},
        "held_out_loss": 2 - accuracy,
        "held_out_loss_before": 1.8,
        "trainable_parameters": trained,
        "adapter_bytes": 29_638_656,
        "calibration_s": 3.5,
        "training_s": 26.2,
        "total_s": 40.0,
        "peak_memory_bytes": 700_000_000,
        "training": {"num_steps": 262, "final_loss": 1.1},
        "hashes": {"model": "a1" * 32, "basis": "b2" * 32},
        "provenance": {"commit": "c3" * 20, "versions": {"torch": "2.13.0"}, "device": "a CPU", "platform": "Linux"},
        **values,
    }


@pytest.fixture(scope="session")
def make_record() -> Callable[..., dict[str, Any]]:
    return made_up_record


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
        record: Callable[[Mapping[str, Any]], Record | None] = made_up_record,
        choices: tuple[tuple[dict[str, Any], Choice], ...] = (),
    ) -> StudyResults:
        made = campaign(yaml)
        name, only = next(iter(made.studies.items()))
        return StudyResults(name, only, tuple(cells_of(name, only.axes, record)), choices)

    return make


def cells_of(study: str, axes: Mapping[str, Any], record: Callable[[Mapping[str, Any]], Record | None]) -> list[Cell]:
    """The cells of a study; every run has an id of its own."""
    found: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        found = [{**before, name: value} for before in found for value in values]
    cells = []
    for values in found:
        came = record(values)
        failed = came is not None and "reason" in came
        run_id = hashlib.sha256(f"{study} {values}".encode()).hexdigest()[:16]
        cells.append(Cell(values, run_id, None if failed else came, came if failed else None))
    return cells


@pytest.fixture(scope="session")
def results(campaign: MakeCampaign) -> Callable[..., CampaignResults]:
    """The results of a campaign from the YAML of its studies."""

    def make(yaml: str, record: Callable[[Mapping[str, Any]], Record | None] = made_up_record) -> CampaignResults:
        made = campaign(yaml)
        studies = (
            StudyResults(name, one, tuple(cells_of(name, one.axes, record)), ()) for name, one in made.studies.items()
        )
        return CampaignResults(made, tuple(studies))

    return make
