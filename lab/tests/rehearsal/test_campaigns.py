"""Every file in campaigns/, rehearsed: no cell of its report is empty."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from math import prod
from pathlib import Path

import pytest

from counterparts import counterparts
from frozencore_lab.campaign.results import load_results
from frozencore_lab.campaign.spec import Campaign, read_campaign
from frozencore_lab.campaign.worker_pool import OwnProcess
from frozencore_lab.rehearsal.rehearse import Means, Rehearsal, rehearse
from frozencore_lab.rehearsal.sample import quick_sample
from frozencore_lab.reports.across import across_document
from frozencore_lab.reports.writing import file_names
from places import LAB

CAMPAIGNS = sorted((LAB / "campaigns").glob("*.yaml"))
UNSEARCHED = ("paper-1.5b", "paper-7b", "paper-llama-1b")
"""Campaigns much like paper-3b, whose searches are rehearsed."""


MEANS = Means(
    data_root=None,
    models={},
    hire=OwnProcess,
    watch=lambda store: nullcontext(lambda *_: None),
)


def read(name: str) -> Campaign:
    return read_campaign(LAB / "campaigns" / f"{name}.yaml")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rehearsal]:
    """A quick rehearsal of a campaign, each made once."""

    @cache
    def made(name: str) -> Rehearsal:
        campaign = read(name)
        if name in UNSEARCHED:
            studies = {key: study.model_copy(update={"search": None}) for key, study in campaign.studies.items()}
            campaign = campaign.model_copy(update={"studies": studies})
        return rehearse(campaign, quick_sample(campaign), tmp_path_factory.mktemp(name) / "out", MEANS)

    return made


@pytest.mark.rehearsal
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_every_campaign_fills_every_cell_of_its_report_and_writes_the_papers_tables(
    path: Path, rehearsed: Callable[[str], Rehearsal]
) -> None:
    found = rehearsed(path.stem)
    assert not found.lacks, [f"{lack.study}, {lack.where}: {lack.why}" for lack in found.lacks[:5]]
    assert found.num_failed == 0
    assert {account.name for account in found.studies if account.filled} >= set(read(path.stem).studies)
    assert sum(account.filled for account in found.studies) > 20
    written = {file.partition("/")[2] for file in found.files}
    for line in counterparts():
        assert set(line.files) <= written or line.campaigns != (path.stem,), line.label


@pytest.mark.rehearsal
@pytest.mark.parametrize("names", sorted({line.campaigns for line in counterparts() if len(line.campaigns) > 1}))
def test_campaigns_together_write_the_papers_tables(
    names: tuple[str, ...], rehearsed: Callable[[str], Rehearsal]
) -> None:
    together = across_document([load_results(Path(rehearsed(name).folder)) for name in names])
    written = set(file_names(together))
    for line in counterparts():
        assert set(line.files) <= written or line.campaigns != names, line.label


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in CAMPAIGNS if path.stem.startswith("paper")], ids=lambda p: p.stem)
def test_a_whole_rehearsal_of_each_paper_campaign_fills_every_cell(
    command: Callable[..., tuple[int, str, str]], path: Path, tmp_path: Path
) -> None:
    """Some minutes each: docs/campaign.md says how many."""
    status, out, err = command("campaign", "rehearse", path, "--output", tmp_path / "out", "--workers", 2)
    assert (status, err) == (0, ""), out[-3000:]
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert found["num_failed"] == 0
    accounts = found["studies"]
    assert not any(account["lacks"] for account in accounts)
    assert all(account["filled"] for account in accounts if account["num_tables"])
    campaign = read(path.stem)
    results = {study.name: study for study in load_results(tmp_path / "out").studies}
    assert set(results) == set(campaign.studies)
    for name, study in campaign.studies.items():
        sizes = {axis: len(values) for axis, values in study.axes.items()}
        assert len(results[name].runs) == prod((sizes | {"seed": min(2, sizes["seed"])}).values()), name
        assert not results[name].missing
