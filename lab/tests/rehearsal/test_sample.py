"""The part of a campaign that is rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import Campaign, Study, read_campaign
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.rehearsal.rehearsal_rows import RehearsalPlace
from frozencore_lab.rehearsal.sample import quick_sample, whole_sample
from places import LAB

CAMPAIGNS = sorted((LAB / "campaigns").glob("*.yaml"))


def num_runs(campaign: Campaign) -> int:
    return len({run.job.id if run.job else str(run.axes) for run in plan(campaign, lambda _: None)})


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_whole_sample_is_the_specification_but_for_the_seeds(path: Path) -> None:
    campaign = read_campaign(path)
    part = whole_sample(campaign).campaign
    for name, study in campaign.studies.items():
        ours = part.studies[name]
        assert ours.axes["seed"] == study.axes["seed"][:2]
        assert ours.model_copy(update={"axes": study.axes}) == study
        assert {**ours.axes, "seed": study.axes["seed"]} == study.axes


def test_a_whole_sample_has_16_bits_on_one_task_of_each_kind_of_scoring() -> None:
    campaign = read_campaign(LAB / "campaigns" / "paper-3b.yaml")
    sample = whole_sample(campaign)
    assert sample.tasks_in_16_bits == ("svamp", "sst2")  # a generated number, and a choice
    assert "bfloat16 on svamp and sst2, float32 elsewhere" in sample.left_out
    num_train = dict.fromkeys(("svamp", "gsm8k", "sst2"), 5)
    for is_quick, dtypes in ((False, ["bfloat16", "float32", "bfloat16"]), (True, ["float32"] * 3)):
        place = RehearsalPlace(num_train=num_train, tasks_in_16_bits=sample.tasks_in_16_bits, is_quick=is_quick)
        configs = [make_job("tune", {**campaign.base, "model": "pocket", "task": task}).config for task in num_train]
        assert [place.put(config).dtype for config in configs] == dtypes


def test_the_16_bits_of_a_variant_are_seen(tmp_path: Path) -> None:
    text = (
        (LAB / "campaigns" / "demo.yaml").read_text().replace("method: lora, rank: 1", "method: lora, dtype: bfloat16")
    )
    (tmp_path / "campaign.yaml").write_text(text)
    assert any("bfloat16 on " in said for said in whole_sample(read_campaign(tmp_path / "campaign.yaml")).left_out)


@pytest.mark.parametrize("stem", ["pocket", "demo"])
def test_a_campaign_in_32_bits_leaves_nothing_of_them_out(stem: str) -> None:
    assert not any("elsewhere" in said for said in whole_sample(read_campaign(LAB / f"campaigns/{stem}.yaml")).left_out)


def values_of(campaign: Campaign, *axes: str) -> set[tuple[str, Value]]:
    """The values of axes anywhere in a campaign."""
    return {
        (axis, value)
        for study in campaign.studies.values()
        for axis, values in study.axes.items()
        if axis in axes or (not axes and axis != "seed")
        for value in values
    }


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_quick_sample_has_every_study_and_every_value_of_every_axis(path: Path) -> None:
    campaign = read_campaign(path)
    sample = quick_sample(campaign)
    part = sample.campaign
    assert Campaign.model_validate_json(part.model_dump_json(), strict=True) == part
    assert {run.study for run in plan(part, lambda _: None)} == set(part.studies)
    assert values_of(part) == values_of(campaign)
    for name, study in campaign.studies.items():
        ours = part.studies[name]
        assert ours.report == study.report
        for axis in study.report.columns:
            assert len(ours.axes[axis]) >= min(2, len(study.axes[axis])) or axis == "task"
        if study.report.reference not in (None, "matched"):
            assert str(study.report.reference) in {
                str(v) for axis in (*study.report.rows, *study.report.columns) for v in ours.axes[axis]
            }
    whole, quick = num_runs(whole_sample(campaign).campaign), num_runs(part)
    assert quick <= whole
    if path.stem.startswith("paper") and "ablations" not in path.stem:  # these have little to leave out
        assert 10 * quick < whole


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_quick_sample_searches_each_study_and_each_task(path: Path) -> None:
    campaign = read_campaign(path)
    sample = quick_sample(campaign)
    searched = {
        (run.study, str(run.axes["task"])) for run in plan(sample.campaign, lambda _: None) if run.phase == "search"
    }
    with_search = {name: study for name, study in campaign.studies.items() if any_search(study)}
    assert {study for study, _ in searched} >= set(with_search)
    assert {task for _, task in searched} == {task for study in with_search.values() for task in study.axes["task"]}


def any_search(study: Study) -> bool:
    grids = study.search.grids if study.search else ()
    return any(len(values) > 1 for grid in grids for option, values in grid.items() if option != "for")
