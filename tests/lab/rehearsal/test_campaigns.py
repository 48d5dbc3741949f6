"""Every file in campaigns/, rehearsed: no cell of its report is empty."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from frozencore.lab.campaign.crew import OwnProcess
from frozencore.lab.campaign.spec import Campaign, read_campaign
from frozencore.lab.campaign.worker import Worker
from frozencore.lab.rehearsal.rehearse import Means, Rehearsal, rehearse
from frozencore.lab.rehearsal.sample import Sample, quick_sample
from places import ROOT

CAMPAIGNS = sorted((ROOT / "campaigns").glob("*.yaml"))
WITH_ALL_TASKS = "paper-3b"  # of the four campaigns that differ in their models alone
TWO_CORES_FOR_FIVE_MINUTES_S = 600

MEANS = Means(
    data_root=None,
    models={},
    hire=lambda store, place: OwnProcess(Worker(store, place)),
    watch=lambda store: nullcontext(lambda *_: None),
)


def rehearsed(campaign: Campaign, sample: Sample, folder: Path) -> Rehearsal:
    return rehearse(campaign, sample, folder / "out", MEANS)


@pytest.mark.slow
@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_every_campaign_fills_every_cell_of_its_report(path: Path, tmp_path: Path) -> None:
    campaign = read_campaign(path)
    seen = [read_campaign(ROOT / "campaigns" / f"{WITH_ALL_TASKS}.yaml")] if path.stem != WITH_ALL_TASKS else []
    found = rehearsed(campaign, quick_sample(campaign, seen), tmp_path)
    assert not found.lacks, [f"{lack.study}, {lack.where}: {lack.why}" for lack in found.lacks[:5]]
    assert (found.num_failed, {account.name for part in found.parts for account in part}) == (0, set(campaign.studies))
    assert sum(account.filled for part in found.parts for account in part) > 20


def test_the_papers_campaigns_differ_in_their_models_alone() -> None:
    one = read_campaign(ROOT / "campaigns" / f"{WITH_ALL_TASKS}.yaml")
    for name in ("paper-1.5b", "paper-7b", "paper-llama-1b"):
        sample = quick_sample(read_campaign(ROOT / "campaigns" / f"{name}.yaml"), [one])
        assert len(sample.parts) == 1
        assert "differs in its models alone" in sample.left_out[0]


@pytest.mark.slow
def test_a_whole_rehearsal_of_a_papers_campaign_takes_two_cores_five_minutes(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    spec = ROOT / "campaigns" / f"{WITH_ALL_TASKS}.yaml"
    before = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    status, out, err = command("campaign", "rehearse", spec, "--output", tmp_path / "out", "--workers", 2)
    after = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    assert (status, err) == (0, ""), out[-3000:]
    assert after - before < TWO_CORES_FOR_FIVE_MINUTES_S
