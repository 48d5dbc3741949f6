"""From a specification to an account of its report: every run of it, small, through the campaign's own engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from frozencore.errors import ArtifactError
from frozencore.files.whole_file import require_writable, write_json
from frozencore.tune.run.record import Failure
from frozencore_lab.campaign.crew import Crew
from frozencore_lab.campaign.drive import Watch, drive
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.results import load_results
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place
from frozencore_lab.rehearsal.account import Lack, StudyAccount, account_of
from frozencore_lab.rehearsal.needs import Need, real_needs
from frozencore_lab.rehearsal.sample import Sample
from frozencore_lab.rehearsal.stand_ins import StandIns, originals_of, set_up
from frozencore_lab.reports.campaign import campaign_document
from frozencore_lab.reports.writing import write_document

MARK = "rehearsal.json"


@dataclass(frozen=True)
class Means:
    """What a rehearsal is made with.

    Attributes:
        data_root: Where real data sets may lie; None is the offline cache.
        models: Folders of models to use instead of stand-ins, by the campaign's names of them.
        hire: Makes the workers of a folder.
        watch: Shows a folder's runs as they go on.
    """

    data_root: Path | None
    models: Mapping[str, str]
    hire: Callable[[Store, Place], Crew]
    watch: Callable[[Store], AbstractContextManager[Watch]]


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        num_runs: That were made, and how many of them failed.
        left_out: What was sampled, in words.
        parts: The account of each part of the sample, by section.
        files: Of the report, in the rehearsal's folder.
        stand_ins: By model as the campaign says it, the architecture that stood for it.
        made_up: Data sets whose rows were made up.
    """

    campaign: str
    folder: str
    num_runs: int
    num_failed: int
    time_s: float
    left_out: tuple[str, ...]
    parts: tuple[tuple[StudyAccount, ...], ...]
    files: tuple[str, ...]
    stand_ins: Mapping[str, str]
    made_up: tuple[str, ...]
    needs: tuple[Need, ...]

    @property
    def lacks(self) -> list[Lack]:
        """All that the report would lack."""
        return [lack for part in self.parts for account in part for lack in account.lacks]


def rehearse(campaign: Campaign, sample: Sample, folder: Path, means: Means) -> Rehearsal:
    """Make every run of a sample on stand-ins, write the report, and count what it holds.

    Args:
        folder: A new one, or that of an earlier rehearsal, which is removed.

    Raises:
        ModelError: The architecture of a model is not known here.
        DataError: A data set is not at hand and its rows cannot be made up.
        ArtifactError: The folder holds something else.
    """
    started = time.monotonic()
    originals = originals_of(campaign, means.models)
    _begin(folder, campaign)
    stand_ins = set_up(
        campaign, sample, originals, folder / "stand-ins", data_root=means.data_root, models=means.models
    )
    with ThreadPoolExecutor() as aside:
        needs = aside.submit(real_needs, campaign, stand_ins, folder)
        performed = list(_perform(sample, folder, stand_ins, means))
        stand_ins.data.forget()
        store = Store(folder)
        ids = {path.name for kind in (store.runs, store.failed) for path in kind.glob("[0-9a-f]*")}
        outcomes = [store.outcome(run_id) for run_id in ids]
        found = Rehearsal(
            campaign.name,
            str(folder),
            len(outcomes),
            sum(isinstance(outcome, Failure) for outcome in outcomes),
            time.monotonic() - started,
            sample.left_out,
            tuple(tuple(accounts) for accounts, _ in performed),
            tuple(str(file.relative_to(folder)) for _, files in performed for file in files),
            {location: original.config.model_type for location, original in stand_ins.originals.items()},
            tuple(stand_ins.data.made_up),
            tuple(needs.result()),
        )
    write_json(folder / MARK, asdict(found))
    return found


def _perform(
    sample: Sample, folder: Path, stand_ins: StandIns, means: Means
) -> Iterator[tuple[list[StudyAccount], list[Path]]]:
    """Run each part and account for its report; that of the last is written: the account, and the files."""
    store = Store(folder)
    crew = means.hire(store, stand_ins.place)
    for part in sample.parts:
        with closing(crew), means.watch(store) as watcher:
            drive(part, store, crew, watcher)
        document = campaign_document(load_results(folder))
        files = write_document(document, folder / "report") if part is sample.parts[-1] else []
        yield account_of(document, plan(part, store.outcome), store), files


def _begin(folder: Path, campaign: Campaign) -> None:
    """An empty folder with a mark, by which a later rehearsal knows that it may remove it."""
    require_writable(folder)
    if (folder / MARK).is_file():
        shutil.rmtree(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} holds something that is no rehearsal. Choose another --output.")
    write_json(folder / MARK, {"campaign": campaign.name})
