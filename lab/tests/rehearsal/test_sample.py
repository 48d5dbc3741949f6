"""What of a campaign is rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import Campaign, Study, read_campaign
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.rehearsal.place import RehearsalPlace
from frozencore_lab.rehearsal.sample import Sample, quick_sample, whole_sample
from frozencore_lab.rehearsal.sizes import Shares
from places import LAB

CAMPAIGNS = sorted((LAB / "campaigns").glob("*.yaml"))


def num_runs(campaign: Campaign) -> int:
    return len({run.job.id if run.job else str(run.axes) for run in plan(campaign, lambda _: None)})


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_whole_sample_is_the_specification_but_for_the_seeds(path: Path) -> None:
    campaign = read_campaign(path)
    (part,) = whole_sample(campaign).parts
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
    shares = {task: Shares(0.01, 0.01) for task in ("svamp", "gsm8k", "sst2")}
    for is_quick, dtypes in ((False, ["bfloat16", "float32", "bfloat16"]), (True, ["float32"] * 3)):
        place = RehearsalPlace(shares=shares, tasks_in_16_bits=sample.tasks_in_16_bits, is_quick=is_quick)
        configs = [make_job("tune", {**campaign.base, "model": "pocket", "task": task}).config for task in shares]
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
    """What axes go through anywhere in a campaign."""
    return {
        (axis, value)
        for study in campaign.studies.values()
        for axis, values in study.axes.items()
        if axis in axes or (not axes and axis != "seed")
        for value in values
    }


def all_values(sample: Sample) -> set[tuple[str, Value]]:
    return set().union(*map(values_of, sample.parts))


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_quick_sample_has_every_study_and_every_value_of_every_axis(path: Path) -> None:
    campaign = read_campaign(path)
    sample = quick_sample(campaign)
    for part in sample.parts:
        assert Campaign.model_validate_json(part.model_dump_json(), strict=True) == part
        assert {run.study for run in plan(part, lambda _: None)} == set(part.studies)
    assert all_values(sample) == values_of(campaign)
    for name, study in campaign.studies.items():
        ours = sample.parts[-1].studies[name]
        assert ours.report == study.report
        for axis in study.report.columns:
            assert len(ours.axes[axis]) >= min(2, len(study.axes[axis])) or axis == "task"
        if study.report.reference not in (None, "matched"):
            assert str(study.report.reference) in {
                str(v) for axis in (*study.report.rows, *study.report.columns) for v in ours.axes[axis]
            }
    whole, quick = num_runs(whole_sample(campaign).parts[0]), sum(map(num_runs, sample.parts))
    assert quick <= whole
    if path.stem.startswith("paper") and "ablations" not in path.stem:  # these have little to leave out
        assert 10 * quick < whole


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_quick_sample_searches_each_study_and_each_task(path: Path) -> None:
    campaign = read_campaign(path)
    sample = quick_sample(campaign)
    searched = {
        (run.study, str(run.axes["task"]))
        for part in sample.parts
        for run in plan(part, lambda _: None)
        if run.phase == "search"
    }
    with_search = {name: study for name, study in campaign.studies.items() if any_search(study)}
    assert {study for study, _ in searched} == set(with_search)
    assert {task for _, task in searched} == {task for study in with_search.values() for task in study.axes["task"]}


def any_search(study: Study) -> bool:
    grids = study.search.grids if study.search else ()
    return any(len(values) > 1 for grid in grids for option, values in grid.items() if option != "for")


@pytest.mark.parametrize("name", ["paper-1.5b", "paper-7b", "paper-llama-1b"])
def test_what_differs_in_its_models_alone_goes_through_each_study_task_and_method_but_searches_nothing(
    name: str,
) -> None:
    other, campaign = (read_campaign(LAB / "campaigns" / f"{stem}.yaml") for stem in ("paper-3b", name))
    sample = quick_sample(campaign, [other])
    assert all_values(sample) >= values_of(campaign, "model", "task", "method")
    assert set(sample.parts[-1].studies) == set(campaign.studies)
    planned = [run for part in sample.parts for run in plan(part, lambda _: None)]
    assert {run.phase for run in planned} == {"final"}
    assert any(run.phase == "search" for part in quick_sample(other).parts for run in plan(part, lambda _: None))
    assert "no search" in " ".join(sample.left_out)


def test_what_another_campaign_went_through_comes_again_where_a_table_needs_it() -> None:
    other, campaign = (read_campaign(LAB / "campaigns" / f"{stem}-ablations.yaml") for stem in ("paper-3b", "pocket"))
    sample = quick_sample(campaign, [other])
    assert all_values(sample) >= values_of(campaign, "task", "method")
    assert {part.studies.keys() >= campaign.studies.keys() for part in sample.parts[-1:]} == {True}
    new = values_of(campaign) - values_of(other)
    assert new
    assert new <= all_values(sample)
    assert len(all_values(sample)) < len(values_of(campaign))
