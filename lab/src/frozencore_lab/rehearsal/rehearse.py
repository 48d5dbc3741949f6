"""Rehearse a specification: make every run, small, with the campaign's own code, and check the report.

The account names every empty cell of every table, every missing figure, and every run without a result.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from frozencore.errors import ArtifactError, ModelError
from frozencore.files.whole_file import require_writable, write_json
from frozencore.tune.run.record import Failure
from frozencore_lab.campaign.driver import Watch, drive
from frozencore_lab.campaign.plan import Planned, plan
from frozencore_lab.campaign.results import load_results
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import WorkerPool
from frozencore_lab.rehearsal.models import LAYERS, Original, find_original, make_stand_in
from frozencore_lab.rehearsal.needs import Need, real_needs
from frozencore_lab.rehearsal.rehearsal_rows import FewRows, RehearsalPlace, lay_out
from frozencore_lab.rehearsal.sample import Sample
from frozencore_lab.reports.campaign import campaign_document
from frozencore_lab.reports.document import Document, Section
from frozencore_lab.reports.figures import asked_figures
from frozencore_lab.reports.sheet import Line, Sheet, SheetCell
from frozencore_lab.reports.writing import write_document


@dataclass(frozen=True)
class Lack:
    """A missing part of a report.

    Attributes:
        study: The section.
        where: Table, row and column; or the figure, or the run.
    """

    study: str
    where: str
    why: str


@dataclass(frozen=True)
class StudyAccount:
    """The counts of one section of a report."""

    name: str
    title: str
    num_tables: int
    num_figures: int
    filled: int
    lacks: tuple[Lack, ...]


def account_of(document: Document, planned: Sequence[Planned], store: Store) -> list[StudyAccount]:
    """Count a report's cells and figures.

    Args:
        planned: The campaign's runs; a failed trial leaves no empty cell, but the search has fewer trials.
    """
    studies = {study.name: study.study for campaign in document.campaigns for study in campaign.studies}
    accounts = []
    for section in document.sections:
        lacks = list(_empty_cells(section))
        asked = asked_figures(studies[section.name]) if section.name in studies else ()
        if asked and not section.drawings:
            lacks.append(Lack(section.name, f"figure: {' and '.join(asked)}", "there is nothing to draw"))
        lacks += _failed_trials(section.name, planned, store)
        filled = sum(not cell.is_empty for table in section.tables for _, _, cell in _numbers(table.sheet))
        accounts.append(
            StudyAccount(section.name, section.title, len(section.tables), len(section.drawings), filled, tuple(lacks))
        )
    return accounts


def _numbers(sheet: Sheet) -> Iterator[tuple[Line, int, SheetCell]]:
    """The cells of a sheet that are neither labels nor blank."""
    for line in (*sheet.rows, *sheet.foot):
        for place, cell in enumerate(line):
            if place >= sheet.num_labels and cell.text:
                yield line, place, cell


def _empty_cells(section: Section) -> Iterator[Lack]:
    for table in section.tables:
        sheet = table.sheet
        for line, place, cell in _numbers(sheet):
            if cell.is_empty:
                row = ", ".join(label.text for label in line[: sheet.num_labels] if label.text)
                messages = [run.message for run in cell.runs if run.value is None and run.message]
                why = messages[0] if messages else cell.hint or "no reason is known"
                yield Lack(section.name, f"{sheet.name}: {row}, {sheet.headings[place]}", why)
        if table.remark:
            yield Lack(section.name, sheet.name, table.remark)


def _failed_trials(study: str, planned: Sequence[Planned], store: Store) -> Iterator[Lack]:
    for run in planned:
        failure = store.outcome(run.job.id) if run.job and run.study == study and run.phase == "search" else None
        if isinstance(failure, Failure):
            axes = ", ".join(f"{name} {value}" for name, value in run.axes.items() if name != "model")
            yield Lack(study, f"trial: {axes}", f"{failure.reason}: {failure.message}")


MARK = "rehearsal.json"


@dataclass(frozen=True)
class Means:
    """The inputs and functions of a rehearsal.

    Attributes:
        data_root: The folder of real data sets; None is the offline cache.
        models: Folders of models in place of stand-ins, by their names in the campaign.
        hire: Makes a pool of workers.
        watch: Shows the progress of a folder's runs.
    """

    data_root: Path | None
    models: Mapping[str, str]
    hire: Callable[[Worker], WorkerPool]
    watch: Callable[[Store], AbstractContextManager[Watch]]


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        num_runs: The number of runs made, and of failed runs.
        left_out: A description of the sample.
        studies: The account of each section of the report.
        files: The files of the report, in the rehearsal's folder.
        stand_ins: The architecture of each stand-in, by the model's name in the campaign.
        made_up: Data sets with made-up rows.
    """

    campaign: str
    folder: str
    num_runs: int
    num_failed: int
    time_s: float
    left_out: tuple[str, ...]
    studies: tuple[StudyAccount, ...]
    files: tuple[str, ...]
    stand_ins: Mapping[str, str]
    made_up: tuple[str, ...]
    needs: tuple[Need, ...]

    @property
    def lacks(self) -> list[Lack]:
        """All missing parts of the report."""
        return [lack for account in self.studies for lack in account.lacks]


def rehearse(campaign: Campaign, sample: Sample, folder: Path, means: Means) -> Rehearsal:
    """Make every run of a sample on stand-ins, write the report, and check it.

    Args:
        folder: A new folder, or an earlier rehearsal's, which is removed.

    Raises:
        ModelError: The architecture of a model is unknown.
        DataError: A data set is not available and its rows cannot be made up.
        ArtifactError: The folder holds something else.
    """
    started = time.monotonic()
    originals = {location: _original(location, means.models.get(name)) for name, location in campaign.models.items()}
    _begin(folder, campaign)
    configs = [run.job.config for run in plan(sample.campaign, lambda _: None) if run.job]
    rows = lay_out(configs, folder / "stand-ins" / "data", means.data_root)
    place = _place(campaign, sample, originals, rows, folder / "stand-ins" / "models", means)
    store = Store(folder)
    pool = means.hire(Worker(store, place))
    needs = real_needs(campaign, originals, rows, folder)  # in no thread: making models changes torch for all threads
    with closing(pool), means.watch(store) as watcher:
        drive(sample.campaign, store, pool, watcher)
    document = campaign_document(load_results(folder))
    files = write_document(document, folder / "report")
    rows.forget()
    ended = [store.outcome(path.name) for kind in (store.runs, store.failed) for path in kind.glob("[0-9a-f]*")]
    found = Rehearsal(
        campaign=campaign.name,
        folder=str(folder),
        num_runs=len(ended),
        num_failed=sum(isinstance(end, Failure) for end in ended),
        time_s=time.monotonic() - started,
        left_out=sample.left_out,
        studies=tuple(account_of(document, plan(sample.campaign, store.outcome), store)),
        files=tuple(str(file.relative_to(folder)) for file in files),
        stand_ins={location: original.config.model_type for location, original in originals.items()},
        made_up=tuple(rows.made_up),
        needs=tuple(needs),
    )
    write_json(folder / MARK, asdict(found))
    return found


def _place(
    campaign: Campaign, sample: Sample, originals: Mapping[str, Original], rows: FewRows, folder: Path, means: Means
) -> RehearsalPlace:
    """Make a stand-in of each model for which the user gives no folder."""
    places = {campaign.models[name]: path for name, path in means.models.items()}
    ours = {location: name for name, location in campaign.models.items() if location not in places}
    for location, name in ours.items():
        places[location] = str(folder / name)
        make_stand_in(originals[location], rows.texts, folder / name, 1 if sample.is_quick else LAYERS)
    return RehearsalPlace(
        rows.root,
        "cpu",
        places,
        num_train=rows.num_train,
        stand_ins=tuple(ours),
        tasks_in_16_bits=sample.tasks_in_16_bits,
        is_quick=sample.is_quick,
    )


def _original(location: str, instead: str | None) -> Original:
    """The model that a campaign names; if it is unknown, the user's replacement."""
    try:
        return find_original(location)
    except ModelError:
        if instead is None:
            raise
        return find_original(instead)


def _begin(folder: Path, campaign: Campaign) -> None:
    """Make an empty folder with a mark, so that a later rehearsal may remove it."""
    require_writable(folder)
    if (folder / MARK).is_file():
        shutil.rmtree(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} holds something that is no rehearsal. Choose another --output.")
    write_json(folder / MARK, {"campaign": campaign.name})
