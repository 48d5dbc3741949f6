"""From a specification to an account of its report: every run of it, small, through the campaign's own engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from frozencore.errors import ArtifactError, ModelError
from frozencore.lab.campaign.crew import Crew
from frozencore.lab.campaign.drive import Watch, drive
from frozencore.lab.campaign.job import Job
from frozencore.lab.campaign.plan import plan
from frozencore.lab.campaign.results import load_results
from frozencore.lab.campaign.shared import calibrating
from frozencore.lab.campaign.spec import Campaign
from frozencore.lab.campaign.store import Store
from frozencore.lab.campaign.worker import Place
from frozencore.lab.rehearsal.account import Lack, StudyAccount, account_of
from frozencore.lab.rehearsal.data import StandInData, lay_out
from frozencore.lab.rehearsal.models import Original, find_original, make_stand_in
from frozencore.lab.rehearsal.needs import (
    Need,
    has_weights,
    need_of_hub,
    needs_of_data,
    needs_of_machine,
    needs_of_models,
)
from frozencore.lab.rehearsal.place import RehearsalPlace
from frozencore.lab.rehearsal.sample import Sample
from frozencore.lab.reports.campaign import campaign_document
from frozencore.lab.reports.writing import write_document
from frozencore.whole_file import require_writable, write_json

MARK = "rehearsal.json"
CALIBRATED = 5  # examples of the largest calibration


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        num_runs: That were made, and how many of them failed.
        left_out: What was sampled, in words.
        parts: The account of each part of the sample, by section.
        files: Of the reports, in the rehearsal's folder.
        stand_ins: By model as the campaign says it, what stood for it.
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


def rehearse(
    campaign: Campaign,
    sample: Sample,
    folder: Path,
    *,
    data_root: Path | None,
    models: Mapping[str, str],
    hire: Callable[[Store, Place], Crew],
    watch: Callable[[Store], AbstractContextManager[Watch]],
    dtype: str | None = None,
) -> Rehearsal:
    """Make every run of a sample on stand-ins, write the report, and count what it holds.

    Args:
        folder: A new one, or that of an earlier rehearsal, which is removed.
        data_root: Where real data sets may lie; None is the offline cache.
        models: Folders of models to use instead of stand-ins, by the campaign's names of them.
        hire: Makes the workers of a folder.
        watch: Shows a folder's runs as they go on.
        dtype: Of the models, instead of the campaign's.

    Raises:
        ModelError: The architecture of a model is not known here.
        ArtifactError: The folder holds something else.
    """
    started = time.monotonic()
    jobs = [run.job for part in sample.parts for run in plan(part, lambda _: None) if run.job]
    originals = {location: _original(location, models.get(name)) for name, location in campaign.models.items()}
    _begin(folder, campaign)
    data = lay_out([job.config for job in jobs], folder / "stand-ins" / "data", data_root)
    with ThreadPoolExecutor() as aside:
        real = aside.submit(_real_needs, campaign, originals, data, folder)
        place = _place(campaign, jobs, data, originals, models, folder, dtype)
        store = Store(folder)
        crew = hire(store, place)
        parts, files = [], []
        for number, part in enumerate(sample.parts):
            with closing(crew), watch(store) as watcher:
                drive(part, store, crew, watcher)
            document = campaign_document(load_results(folder))
            parts.append(tuple(account_of(document, plan(part, store.outcome), store)))
            report = folder / ("report" if number == 0 else f"report-{number + 1}")
            files += [str(file.relative_to(folder)) for file in write_document(document, report)]
        needs = real.result()
    ids = {path.name for kind in (store.runs, store.failed) for path in kind.glob("[0-9a-f]*")}
    outcomes = [store.outcome(run_id) for run_id in ids]
    rehearsal = Rehearsal(
        campaign.name,
        str(folder),
        len(outcomes),
        sum(outcome is not None and outcome.failure is not None for outcome in outcomes),
        time.monotonic() - started,
        sample.left_out,
        tuple(parts),
        tuple(files),
        {location: original.config.model_type for location, original in originals.items()},
        tuple(data.made_up),
        tuple(needs),
    )
    write_json(folder / MARK, asdict(rehearsal))
    return rehearsal


def _original(location: str, instead: str | None) -> Original:
    """What a campaign names; where nothing is known of that, what is to be used instead."""
    try:
        return find_original(location)
    except ModelError:
        if instead is None:
            raise
        return find_original(instead)


def _begin(folder: Path, campaign: Campaign) -> None:
    """An empty folder with a mark, by which a later rehearsal knows that it may remove it."""
    require_writable(folder)
    if (folder / MARK).is_file():
        shutil.rmtree(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} holds something that is no rehearsal. Choose another --output.")
    write_json(folder / MARK, {"campaign": campaign.name})


def _place(
    campaign: Campaign,
    jobs: Sequence[Job],
    data: StandInData,
    originals: Mapping[str, Original],
    models: Mapping[str, str],
    folder: Path,
    dtype: str | None,
) -> RehearsalPlace:
    """Where the runs happen; makes the stand-ins of the models."""
    places = {campaign.models[name]: path for name, path in models.items()}
    stand_ins = []
    for name, location in campaign.models.items():
        if location not in places:
            places[location] = str(folder / "stand-ins" / "models" / name)
            make_stand_in(originals[location], data.texts, Path(places[location]))
            stand_ins.append(location)
    return RehearsalPlace(
        data.root,
        "cpu",
        places,
        shares=data.shares,
        own_tasks=data.own_tasks,
        stand_ins=tuple(stand_ins),
        calibration_share=CALIBRATED / max(config.calibration_size for job in jobs for config in calibrating(job)),
        dtype=dtype,
    )


def _real_needs(campaign: Campaign, originals: Mapping[str, Original], data: StandInData, folder: Path) -> list[Need]:
    models, data_sets = needs_of_models(originals), needs_of_data(data.at_hand, data.made_up)
    absent = [location for location in originals if not has_weights(location)]
    hub = [need_of_hub(absent, list(data.made_up))] if absent or data.made_up else []
    jobs = [run.job for run in plan(campaign, lambda _: None) if run.job]
    return [*models, *data_sets, *hub, *needs_of_machine(jobs, originals, folder)]
