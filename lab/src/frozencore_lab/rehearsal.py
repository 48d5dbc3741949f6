"""Rehearse a specification: make its runs on the pocket model and few rows, and name what its report leaves empty.

A rehearsal sends the campaign's own jobs (studies, methods, searches, two of the seeds) through the same plan, store,
workers and report as the campaign. A run keeps its identity; only its place changes: every model is the pocket model,
weights are float32, and a run has few rows, steps and tokens. The rows are those of the tasks at hand. A task whose
rows are not here leaves its cells empty, and the account says so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import remove, require_writable, write_json
from frozencore.tune.config import RunConfig
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import Failure
from frozencore_lab.campaign.driver import Watch, drive
from frozencore_lab.campaign.job import Place
from frozencore_lab.campaign.plan import Planned, plan
from frozencore_lab.campaign.results import load_results
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import LocalPool, OwnProcess
from frozencore_lab.reports.figures import asked_figures
from frozencore_lab.reports.report import Document, Section, campaign_document, write_document
from frozencore_lab.reports.sheet import Line, Sheet, SheetCell
from frozencore_lab.tasks.registry import find_task, task_of

MARK = "rehearsal.json"
MOST_WORKERS = 4  # by default
SEEDS = 2
STEPS = 2  # the fewest for measuring the time of a step
EVALUATED = 6
CALIBRATED = 8  # one number for all runs of a campaign whose ranks are 64 at most, so that a report may compare them
TOKENS_OF_A_ROW = 8  # the least tokens of a row: a basis needs a token for each of its directions
MOST_NEW_TOKENS = 3


class RehearsalPlace(Place):
    """Put each run on the pocket model with few rows, steps and tokens."""

    def put(self, config: RunConfig) -> RunConfig:
        placed = super().put(config)
        task = find_task(task_of(placed) or "")
        epochs = min(STEPS, config.training.epochs or task.epochs)
        calibrated = max(math.ceil(config.method.r / TOKENS_OF_A_ROW), min(CALIBRATED, config.rows.calibration_size))
        steps_an_epoch = math.ceil(STEPS / epochs)
        changes: dict[str, Any] = {
            "model": str(pocket_model_path()), "dtype": "float32", "epochs": epochs,
            "num_train": max(calibrated, (steps_an_epoch - 1) * config.training.effective_batch_size + 1),
            "num_evaluation": EVALUATED, "calibration_size": calibrated, "max_new_tokens": MOST_NEW_TOKENS,
            "max_length": None, "too_long": "cut",
        }  # fmt: skip
        return placed.replaced(**changes)


@dataclass(frozen=True)
class Lack:
    """A missing part of a section: ``where`` is a table with row and column, a figure, or a run."""

    study: str
    where: str
    why: str


@dataclass(frozen=True)
class StudyAccount:
    """The counts of one section of a report."""

    name: str
    num_tables: int
    num_figures: int
    filled: int
    lacks: tuple[Lack, ...]


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal: its runs, the account of each section of the report, and the report's files."""

    campaign: str
    folder: str
    num_runs: int
    num_failed: int
    time_s: float
    studies: tuple[StudyAccount, ...]
    files: tuple[str, ...]

    @property
    def lacks(self) -> list[Lack]:
        return [lack for account in self.studies for lack in account.lacks]


def rehearse(
    campaign: Campaign, folder: Path, data_root: Path | None, *, num_workers: int | None, watch: Watch
) -> Rehearsal:
    """Make the runs of a campaign on the pocket model, write the report, and check it.

    Args:
        folder: A new folder, or an earlier rehearsal's, which is removed.
        data_root: The folder of the data sets; None is the hub.
        num_workers: Processes; 0 is only this one, None one per core, at most four.

    Raises:
        ArtifactError: The folder holds something else.
    """
    started = time.monotonic()
    studies = {
        name: study.model_copy(update={"axes": {**study.axes, "seed": study.axes["seed"][:SEEDS]}})
        for name, study in campaign.studies.items()
    }
    small = campaign.model_copy(update={"studies": studies})
    plan(small, lambda _: None)  # shows errors before an earlier rehearsal is removed
    _begin(folder, campaign)
    store = Store(folder)
    worker = Worker(store, RehearsalPlace(data_root, "cpu"))
    size = min(MOST_WORKERS, os.cpu_count() or 1) if num_workers is None else num_workers
    with closing(LocalPool(size, worker, devices=("cpu",)) if size else OwnProcess(worker)) as pool:
        drive(small, store, pool, watch)
    document = campaign_document(load_results(folder))
    files = write_document(document, folder / "report")
    planned = plan(small, store.outcome)
    ended = [store.outcome(run_id) for run_id in {run.job.id for run in planned if run.job}]
    found = Rehearsal(
        campaign=campaign.name,
        folder=str(folder),
        num_runs=sum(end is not None for end in ended),
        num_failed=sum(isinstance(end, Failure) for end in ended),
        time_s=time.monotonic() - started,
        studies=tuple(account_of(document, planned, store)),
        files=tuple(str(file.relative_to(folder)) for file in files),
    )
    write_json(folder / MARK, asdict(found))
    return found


def _begin(folder: Path, campaign: Campaign) -> None:
    """Make an empty folder with a mark, so that a later rehearsal may remove it."""
    require_writable(folder)
    if (folder / MARK).is_file():
        with Store(folder).locked("driver", wait=False):  # no other process is in it
            for part in folder.iterdir():
                remove(part)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} holds something that is no rehearsal. Choose another --out.")
    write_json(folder / MARK, {"campaign": campaign.name})


def account_of(document: Document, planned: Sequence[Planned], store: Store) -> list[StudyAccount]:
    """Count a report's cells and figures, and name those that are empty, and failed trials of its searches."""
    studies = {study.name: study.study for study in document.results.studies}
    accounts = []
    for section in document.sections:
        lacks = list(_empty_cells(section))
        asked = asked_figures(studies[section.name]) if section.name in studies else ()
        if asked and not section.drawings:
            lacks.append(Lack(section.name, f"figure: {' and '.join(asked)}", "there is nothing to draw"))
        for run in planned:
            failure = store.outcome(run.job.id) if run.job and run.phase == "search" else None
            if isinstance(failure, Failure) and run.study == section.name:
                axes = ", ".join(f"{name} {value}" for name, value in run.axes.items() if name != "model")
                lacks.append(Lack(section.name, f"trial: {axes}", f"{failure.reason}: {failure.message}"))
        filled = sum(not cell.is_empty for table in section.tables for _, _, cell in _numbers(table.sheet))
        sizes = len(section.tables), len(section.drawings)
        accounts.append(StudyAccount(section.name, *sizes, filled, tuple(lacks)))
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
                why = cell.hint or "no reason is known"
                yield Lack(section.name, f"{sheet.name}: {row}, {sheet.headings[place]}", why)
        if table.remark:
            yield Lack(section.name, sheet.name, table.remark)
