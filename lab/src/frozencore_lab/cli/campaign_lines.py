"""The work of the ``frozencore campaign`` commands, between the command line and the campaign's modules."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from frozencore.cli.display import table_of
from frozencore.cli.stages import LABELS
from frozencore.device import resolve_device
from frozencore.errors import ConfigError, TrainingError
from frozencore.progress import Progress
from frozencore.text import num_of, time_in_words
from frozencore.tune.locate import require_data_root
from frozencore.tune.record import Failure, RunRecord
from frozencore_lab.campaign.driver import drive
from frozencore_lab.campaign.job import ID_DIGITS, Job, Place
from frozencore_lab.campaign.plan import Planned, most_further_trials, plan, search_rows
from frozencore_lab.campaign.results import Tally, failure_lines, mean_time, tally
from frozencore_lab.campaign.shared_moments import needs_of
from frozencore_lab.campaign.spec import Campaign, read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import Event, LocalPool, OwnProcess, WorkerPool

if TYPE_CHECKING:
    from frozencore_lab.rehearsal import Rehearsal

MOST_WORKERS = 8  # by default, on a machine without GPUs
MOST_REASONS = 10


class Board:
    """Show the progress of a campaign: a bar for all runs and one a worker on a terminal, lines elsewhere.

    The bars are shown in the context of ``bars``.
    """

    def __init__(self, console: Console, *, line_every: int = 10) -> None:
        self.console = console
        self.line_every = line_every
        self.told = 0
        self.bars = Bars(
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.all_runs = self.bars.add_task("runs", total=None, note="")
        self.workers: dict[int, TaskID] = {}

    def __call__(self, standing: Tally, running: dict[int, Job], event: Event | None) -> None:
        """Take the campaign's counts, the job of each busy worker, and the latest event."""
        over, left = standing.finished + standing.failed, standing.left
        note = f"[{over}/{over + left}] {standing.failed} failed, {left} left"
        self.bars.update(self.all_runs, completed=over, total=over + left, note=note)
        for worker in self.workers.keys() - running.keys():
            self.bars.remove_task(self.workers.pop(worker))
        for worker in sorted(running.keys() - self.workers.keys()):
            config = running[worker].config
            search = ", search" if config.scoring.is_trial else ""
            name = f"worker {worker}: {config.rows.learns}, {config.method.name}, seed {config.rows.seed}{search}"
            self.workers[worker] = self.bars.add_task(name, total=None, note="starts")
        if event is not None and event.kind == "stage":
            stage = LABELS.get(event.stage, event.stage)
            self.bars.update(self.workers[event.worker], completed=event.done, total=event.total, note=stage)
        elif event is not None and not self.console.is_terminal and (over >= self.told + self.line_every or not left):
            self.told = over
            self.console.print(note, markup=False, highlight=False)


def default_folder(campaign: Campaign) -> Path:
    return Path("runs") / campaign.name


def _opened(spec: Path, output: Path | None) -> tuple[Campaign, Store]:
    """A specification, and the store of its folder, which need not exist."""
    campaign = read_campaign(spec)
    return campaign, Store(output or default_folder(campaign))


def _place(campaign: Campaign, data_root: Path | None, device: str, models: dict[str, str]) -> Place:
    """The machine of the runs, on which the named models of the specification lie in the given folders."""
    for name in models:
        if name not in campaign.models:
            raise ConfigError(f"--model-path {name}=...: the campaign's models are {', '.join(campaign.models)}.")
    return Place(data_root, device, {campaign.models[name]: path for name, path in models.items()})


def _left(planned: Sequence[Planned], store: Store) -> Iterator[Planned]:
    """The runs that neither finished nor failed."""
    return (run for run in planned if run.job is None or store.outcome(run.job.id) is None)


def run_campaign(
    campaign: Campaign,
    output: Path | None,
    console: Console,
    *,
    data_root: Path | None,
    models: dict[str, str],
    num_workers: int | None,
    device: str,
    ray_address: str | None,
    retry_failed: bool,
) -> Tally:
    """Make every run of a campaign that is not done yet.

    Raises:
        ConfigError: The specification is wrong.
        ArtifactError: The folder is not writable, belongs to another campaign, or is in use by another process.
    """
    store = Store(output or default_folder(campaign))
    place = _place(campaign, data_root, device, models)
    if ray_address is None:
        require_data_root(data_root)
        for one in device.split(","):
            resolve_device(one)
    search_rows(_left(plan(campaign, store.outcome), store), place)  # shows errors before the folder is made
    store.require_own(campaign)
    pool = _pool(Worker(store, place, keep_adapters=campaign.keep_adapters), num_workers, ray_address)
    board = Board(console)
    with closing(pool), board.bars:
        standing = drive(campaign, store, pool, board, retry_failed=retry_failed)
    console.print(
        f"{num_of(standing.finished, 'run')} finished, {standing.failed} failed, {standing.left} left.", highlight=False
    )
    for line in failure_lines(plan(campaign, store.outcome), store):
        console.print(line, markup=False, highlight=False, style="yellow")
    return standing


def _pool(worker: Worker, num_workers: int | None, ray_address: str | None) -> WorkerPool:
    device = worker.place.device
    if ray_address is not None:
        from frozencore_lab.campaign.ray_pool import RayPool

        return RayPool(ray_address, num_workers, worker)
    if num_workers == 0:
        return OwnProcess(worker)
    devices = device.split(",")
    if device == "auto" and torch.cuda.is_available():
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    on_cpu = devices in (["auto"], ["cpu"])
    size = num_workers or (min(MOST_WORKERS, os.cpu_count() or 1) if on_cpu else len(devices))
    return LocalPool(size, worker, devices=devices)


def run_one(
    folder: Path, run_id: str, progress: Progress, *, data_root: Path | None, models: dict[str, str], device: str
) -> str:
    """Make one run of a campaign's folder and describe its outcome.

    Raises:
        ConfigError: The campaign has no such run, or the run waits for a search.
        TrainingError: The run failed.
    """
    store = Store(folder)
    campaign = store.campaign()
    jobs = {run.job.id: run.job for run in plan(campaign, store.outcome) if run.job}
    if run_id not in jobs:
        raise ConfigError(
            f"The campaign in {folder} has no run {run_id!r} now: `frozencore campaign plan --ids` lists those that "
            "can be made. A final run appears when its search is over."
        )
    if isinstance(store.outcome(run_id), RunRecord):
        return f"{run_id} is finished already: {store.runs / run_id}"
    worker = Worker(store, _place(campaign, data_root, device, models), keep_adapters=campaign.keep_adapters)
    if not worker.run(jobs[run_id], needs_of(jobs.values()), progress):
        failure = store.outcome(run_id)
        assert isinstance(failure, Failure)
        raise TrainingError(
            f"Run {run_id} failed ({failure.reason}): {failure.message} Its log: {store.log_of_failed(run_id)}"
        )
    return f"{run_id} finished: {store.runs / run_id}"


def ready_ids(spec: Path, output: Path | None, *, data_root: Path | None) -> list[str]:
    """The ids of the runs that are ready, searches first; makes the folder for ``campaign one``."""
    campaign, store = _opened(spec, output)
    runs = sorted(plan(campaign, store.outcome), key=lambda run: run.phase == "final")
    search_rows(_left(runs, store), Place(data_root))
    with store.locked("driver", wait=False):  # a process that makes runs has its own specification
        store.open(campaign)
    return list(dict.fromkeys(run.job.id for run in _left(runs, store) if run.job))


def run_lines(spec: Path, output: Path | None) -> Iterator[str]:
    """Yield a line for each run: its id, study, phase, options and outcome."""
    campaign, store = _opened(spec, output)
    for run in plan(campaign, store.outcome):
        outcome = store.outcome(run.job.id) if run.job else None
        state = "left" if outcome is None else "finished" if isinstance(outcome, RunRecord) else "failed"
        run_id = run.job.id if run.job else "-" * ID_DIGITS
        axes = " ".join(f"{name}={value}" for name, value in run.axes.items())
        yield f"{run_id} {state if run.job else 'waits'} {run.study} {run.phase} {axes}"


def plan_lines(
    spec: Path, output: Path | None, *, data_root: Path | None, models: dict[str, str]
) -> Iterator[RenderableType]:
    """Yield the studies with their runs, and the rows of the searches."""
    campaign, store = _opened(spec, output)
    planned = plan(campaign, store.outcome)
    studies = []
    for name, study in campaign.studies.items():
        own = [run for run in planned if run.study == name]
        done = sum(bool(run.job and store.outcome(run.job.id)) for run in own)
        trials = sum(run.phase == "search" for run in own)
        studies.append((name, study.title, str(trials), str(len(own) - trials), str(done)))
    headings = ("study", "what", "search runs", "final runs", "done")
    yield table_of(f"Campaign {campaign.name}", headings, studies, names=headings[:2])
    standing = tally(planned, store)
    further = most_further_trials(campaign, store.outcome)
    beyond = f", and up to {num_of(further, 'trial')} beyond the ends of grids" if further else ""
    yield (
        f"{num_of(standing.finished + standing.failed + standing.left, 'different run')} at most (studies share equal "
        f"ones){beyond}: "
        f"{standing.finished} finished, {standing.failed} failed, {standing.ready} ready, "
        f"{standing.waiting} wait for their search{mean_time(planned, store)}. Folder: {store.folder}"
    )
    rows = search_rows(planned, _place(campaign, data_root, "auto", models))
    if rows:
        headings, searched = ("task", "trained on", "scored on", "which are", "studies"), []
        for found in rows:
            counts = ("?", "?") if found.unseen else (str(found.trained), str(found.scored))
            searched.append((found.task, *counts, found.source or "could not look", ", ".join(found.studies)))
        yield table_of("Rows of the searches", headings, searched, names=(headings[0], *headings[3:]))
    yield from (f"Rows of {found.task}: could not look. {found.unseen}" for found in rows if found.unseen)


def rehearsal_screen(found: Rehearsal) -> Iterator[RenderableType]:
    """Yield one screen: filled and empty cells of each study, each reason once, and the report's page."""
    runs = num_of(found.num_runs, "run")
    yield Text(
        f"Rehearsal of {found.campaign}: {runs}, {found.num_failed} failed, {time_in_words(found.time_s)}", "bold"
    )
    counts = [(one.num_tables, one.num_figures, one.filled, len(one.lacks)) for one in found.studies]
    rows = [(one.name, *map(str, own)) for one, own in zip(found.studies, counts, strict=True)]
    yield table_of(None, ("study", "tables", "figures", "cells filled", "empty"), rows, names=("study",))
    reasons: dict[str, list[str]] = {}
    for lack in found.lacks:
        reasons.setdefault(lack.why, []).append(f"{lack.study}, {lack.where}")
    for why, places in list(reasons.items())[:MOST_REASONS]:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield Text(f"Empty: {places[0]}{more}: {why}", "red")
    if len(reasons) > MOST_REASONS:
        yield Text(f"and {len(reasons) - MOST_REASONS} more reasons: see rehearsal.json.", "red")
    yield f"{len(found.files)} files: {found.folder}/report"
