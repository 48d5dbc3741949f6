"""Committed results belong to the campaigns that lie in ``campaigns/``: no id has moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frozencore.lab.campaign.job import make_job
from frozencore.lab.campaign.plan import plan
from frozencore.lab.campaign.shared import moments_key
from frozencore.lab.campaign.spec import read_campaign
from frozencore.lab.campaign.store import Store
from frozencore.lab.run.record import TunedRecord

ROOT = Path(__file__).parents[3]
RESULTS = sorted(folder.name for folder in (ROOT / "results").iterdir())


@pytest.mark.parametrize("name", RESULTS)
def test_every_run_of_the_specification_has_its_record_and_every_record_its_run(name: str) -> None:
    store, campaign = Store(ROOT / "results" / name), read_campaign(ROOT / "campaigns" / f"{name}.yaml")
    assert store.campaign() == campaign
    asked_for = {run.job.id if run.job else run.blocked for run in plan(campaign, store.outcome)}
    records = [json.loads(line) for line in (store.folder / "records.jsonl").read_text().splitlines()]
    made = {record["run_id"]: record["config"] for record in records}
    assert asked_for <= made.keys()
    left = [made[run_id] for run_id in made.keys() - asked_for]  # made before they were one with the plain run
    assert all(config["calibration_task"] == config["task"] for config in left)


@pytest.mark.parametrize("name", RESULTS)
def test_a_record_says_what_its_run_was_asked_for(name: str) -> None:
    """The recipe that was trained with, beside the id that its configuration has today."""
    store = Store(ROOT / "results" / name)
    for run in plan(store.campaign(), store.outcome):
        assert run.job is not None
        outcome = store.outcome(run.job.id)
        assert outcome is not None
        assert outcome.record is not None
        if isinstance(outcome.record, TunedRecord):  # a stability run trains nothing
            assert outcome.record.resolved is not None
            recipe, config = outcome.record.resolved.recipe, run.job.config
            said = recipe["learning_rate"], recipe["warmup"]
            assert said == (config.resolved_learning_rate, config.resolved_warmup)


def test_a_warm_up_of_before_it_was_the_methods_own_keeps_its_id() -> None:
    """Ids of version 0.1.0, where 0.03 was the default of every method."""
    options = {"model": "pocket", "task": "pocket-math", "seed": 42}
    papers = {"coordinates": "qr", "alpha": None, "learning_rate": 5e-3}
    before = {("fcca", 0.03): "a95b3872990e6d0d", ("fcca", 0.1): "6b902d5293dc8321"}
    before |= {("lora", 0.03): "ca2e9b1af23b44e5", ("lora", 0.1): "ced8d6fbabf52ad9"}
    for (method, warmup), run_id in before.items():
        own = {**options, "method": method, **(papers if method == "fcca" else {})}
        assert make_job("tune", {**own, "warmup": warmup}).id == run_id
        assert make_job("tune", own).id == before[method, 0.1]


@pytest.mark.parametrize(
    ("options", "run_id", "moments"),
    [
        ({"damping": 0.1}, "03f51bfc66f6b6ab", "1fe4883d9213237a"),
        ({"damping": 1}, "7e8cc8be1024ca24", "1fe4883d9213237a"),
        ({"memory_budget": "8GiB"}, "6020b5848a2c1c55", "1fe4883d9213237a"),
        ({"skip_first": 2}, "2122d67b0dcfb3ea", "244bb9df6696de21"),
        ({"alpha": 3}, "00afe8c6990cd19c", "1fe4883d9213237a"),
        ({"targets": ["q_proj", "v_proj"]}, "1be7e3719d8d67c4", "94de18949473f5f5"),
        ({"coordinates": "raw", "svd_method": "full"}, "15432dd44ba491b7", "1fe4883d9213237a"),
        ({"fisher": "dense", "shrinkage": 1, "whiten": "input"}, "7a34b3c5ffdf56e0", "1fe4883d9213237a"),
        ({"method": "eva", "eva_center": True, "eva_output": "random"}, "628b03b6313fc918", "1fe4883d9213237a"),
        ({"method": "signgrad", "initial_step": 0.1}, "e1d9176e2e19d4db", "1fe4883d9213237a"),
        ({"method": "filora", "filora_fisher": "diagonal"}, "2022aba97a4af641", "1fe4883d9213237a"),
        ({"tokens": "nonzero_delta"}, "e76cf08ba765a4bc", "0498d6e155b88510"),
    ],
)
def test_every_option_keeps_the_ids_and_the_moments_of_its_runs(
    options: dict[str, Any], run_id: str, moments: str
) -> None:
    """Those of version 0.1.0, in which options stood in a list of the lab's own."""
    papers = {"coordinates": "qr", "alpha": None, "learning_rate": 5e-3, "warmup": 0.03}
    job = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42, **papers, **options})
    assert (job.id, moments_key(job.config)) == (run_id, moments)
