"""What of a campaign is rehearsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.lab.campaign.plan import plan
from frozencore.lab.campaign.spec import Campaign, read_campaign
from frozencore.lab.rehearsal.sample import quick_sample, whole_sample
from places import ROOT

CAMPAIGNS = sorted((ROOT / "campaigns").glob("*.yaml"))


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


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_a_quick_sample_has_every_value_of_every_axis_and_option(path: Path) -> None:
    campaign = read_campaign(path)
    sample = quick_sample(campaign)
    for part in sample.parts:
        assert Campaign.model_validate_json(part.model_dump_json(), strict=True) == part
        assert {run.study for run in plan(part, lambda _: None)} == set(part.studies)
    tasks = {task for study in campaign.studies.values() for task in study.axes["task"]}
    assert {task for part in sample.parts for s in part.studies.values() for task in s.axes["task"]} == tasks
    for name, study in campaign.studies.items():
        ours = [part.studies[name] for part in sample.parts if name in part.studies]
        for axis, values in study.axes.items():
            covered = {value for one in ours for value in one.axes[axis]}
            if axis not in ("task", "seed"):
                assert covered == set(values), (name, axis)
        for one in ours:
            assert all(
                len(one.axes[axis]) >= min(2, len(values)) for axis, values in study.axes.items() if axis != "seed"
            )
            if study.report.reference is not None and study.report.reference != "matched":
                assert study.report.reference in {
                    str(v) for axis in (*study.report.rows, *study.report.columns) for v in one.axes[axis]
                }
        if study.search is not None:
            tried = [grid for one in ours if one.search for grid in one.search.grids]
            for grid in study.search.grids:
                for option, values in grid.items():
                    some = {value for few in tried for value in few.get(option, ())}
                    assert {values[0], values[-1]} & some, (name, option)
    whole, quick = num_runs(whole_sample(campaign).parts[0]), sum(map(num_runs, sample.parts))
    assert quick <= whole
    if path.stem.startswith("paper") and "ablations" not in path.stem:  # these have little to leave out
        assert 3 * quick < whole
