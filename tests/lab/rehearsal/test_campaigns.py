"""Every file in campaigns/, rehearsed: no cell of its report is empty."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from counterparts import counterparts
from frozencore.lab.campaign.crew import OwnProcess
from frozencore.lab.campaign.results import load_results
from frozencore.lab.campaign.spec import read_campaign
from frozencore.lab.campaign.worker import Worker
from frozencore.lab.rehearsal.rehearse import Means, Rehearsal, rehearse
from frozencore.lab.rehearsal.sample import quick_sample
from frozencore.lab.reports.across import across_document
from frozencore.lab.reports.writing import file_names
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


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rehearsal]:
    """A quick rehearsal of a campaign, each made once."""

    @cache
    def made(name: str) -> Rehearsal:
        campaign = read_campaign(ROOT / "campaigns" / f"{name}.yaml")
        seen = [read_campaign(ROOT / "campaigns" / f"{WITH_ALL_TASKS}.yaml")] if name != WITH_ALL_TASKS else []
        return rehearse(campaign, quick_sample(campaign, seen), tmp_path_factory.mktemp(name) / "out", MEANS)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_every_campaign_fills_every_cell_of_its_report_and_writes_the_papers_tables(
    path: Path, rehearsed: Callable[[str], Rehearsal]
) -> None:
    campaign = read_campaign(path)
    found = rehearsed(path.stem)
    assert not found.lacks, [f"{lack.study}, {lack.where}: {lack.why}" for lack in found.lacks[:5]]
    assert found.num_failed == 0
    assert {account.name for part in found.parts for account in part} >= set(campaign.studies)
    assert sum(account.filled for part in found.parts for account in part) > 20
    written = {file.partition("/")[2] for file in found.files}
    for line in counterparts():
        assert set(line.files) <= written or line.campaigns != (path.stem,), line.label


@pytest.mark.slow
@pytest.mark.parametrize("names", sorted({line.campaigns for line in counterparts() if len(line.campaigns) > 1}))
def test_campaigns_together_write_the_papers_tables(
    names: tuple[str, ...], rehearsed: Callable[[str], Rehearsal]
) -> None:
    together = across_document([load_results(Path(rehearsed(name).folder)) for name in names])
    written = set(file_names(together))
    for line in counterparts():
        assert set(line.files) <= written or line.campaigns != names, line.label


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
