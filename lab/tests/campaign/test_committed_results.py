"""Committed results belong to the campaigns that lie in ``lab/campaigns/``: no id has moved."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from frozencore.tune.record import RunRecord, TunedRecord
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.shared_moments import moments_key
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store

LAB = Path(__file__).parents[2]
RESULTS = sorted(folder.name for folder in (LAB / "results").iterdir())


@pytest.mark.parametrize("name", RESULTS)
def test_every_run_of_the_specification_has_its_record_and_every_record_its_run(name: str) -> None:
    store, campaign = Store(LAB / "results" / name), read_campaign(LAB / "campaigns" / f"{name}.yaml")
    assert store.campaign() == campaign
    asked_for = {run.job.id if run.job else run.blocked for run in plan(campaign, store.outcome)}
    lines = (store.folder / "records.jsonl").read_text().splitlines()
    made = {json.loads(line)["run_id"] for line in lines}
    assert asked_for == made


def test_they_are_specifications_and_records() -> None:
    """``campaign report`` makes the rest again: the page, its tables and figures."""
    if shutil.which("git") is None or not (LAB.parent / ".git").exists():
        pytest.skip("no checkout")
    words = ["git", "ls-files", "lab/results"]
    listed = subprocess.run(words, cwd=LAB.parent, capture_output=True, text=True, check=True)
    assert {Path(name).name for name in listed.stdout.split()} == {"campaign.json", "records.jsonl"}


@pytest.mark.parametrize("name", RESULTS)
def test_a_record_says_what_its_run_was_asked_for(name: str) -> None:
    """The recipe that was trained with, beside the id that its configuration has today."""
    store = Store(LAB / "results" / name)
    for run in plan(store.campaign(), store.outcome):
        assert run.job is not None
        record = store.outcome(run.job.id)
        assert isinstance(record, RunRecord)
        if isinstance(record, TunedRecord):  # a stability run trains nothing
            assert record.resolved is not None
            recipe, config = record.resolved.recipe, run.job.config
            said = recipe["learning_rate"], recipe["warmup"]
            assert said == (config.resolved_learning_rate, config.resolved_warmup)


@pytest.mark.parametrize(
    ("options", "run_id", "moments"),
    [
        ({"damping": 0.1}, "a294a435710325f0", "a954193af8d1a2d9"),
        ({"damping": 1}, "53fbe49b0a577588", "a954193af8d1a2d9"),
        ({"memory_budget": "8GiB"}, "29bf900ed0cece1a", "a954193af8d1a2d9"),
        ({"skip_first": 2}, "2e2de4a5ecbcd269", "51ba0a939357ea65"),
        ({"alpha": 3}, "9f703ac3d29726a9", "a954193af8d1a2d9"),
        ({"targets": ["q_proj", "v_proj"]}, "2baf2f7f75b447da", "769b44508dc121e7"),
        ({"coordinates": "raw", "svd_method": "full"}, "d474bd16a6894a0d", "a954193af8d1a2d9"),
        ({"fisher": "dense", "shrinkage": 1, "whiten": "input"}, "9b22156e9341f731", "a954193af8d1a2d9"),
        ({"method": "eva", "eva_center": True, "eva_output": "random"}, "a5545c0b3fe4740c", "a954193af8d1a2d9"),
        ({"method": "signgrad", "initial_step": 0.1}, "b4285846d9d43a6d", "a954193af8d1a2d9"),
        ({"method": "filora", "filora_fisher": "diagonal"}, "968e109a82ea605d", "a954193af8d1a2d9"),
        ({"calibration_task": "pocket-sentiment"}, "a2708a37f9672876", "dc667161ab1de453"),
        ({"tokens": "nonzero_delta"}, "e6c7a407a914ffe6", "1997ffa114d0a40b"),
    ],
)
def test_every_option_keeps_the_ids_and_the_moments_of_its_runs(
    options: dict[str, Any], run_id: str, moments: str
) -> None:
    papers = {"coordinates": "qr", "alpha": None, "learning_rate": 5e-3, "warmup": 0.03}
    job = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42, **papers, **options})
    assert (job.id, moments_key(job.config)) == (run_id, moments)
