"""Estimate a campaign's needs before it starts: rows of the searches, time, memory, disk.

Operations are counted from shapes, and the speed is measured on a short matrix product. Finished runs give the
time of the others. ``EFFICIENCY`` and the tokens of a row are assumptions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from frozencore.device import place_of
from frozencore.errors import ConfigError, DataError, ModelError, NoRowsError
from frozencore.text import bytes_in_words, num_of, time_in_words
from frozencore.tune.config import RunConfig
from frozencore.tune.cost import TOKENS_A_ROW, ModelSize, memory_bytes, moment_bytes, size_of
from frozencore.tune.load import load_config
from frozencore.tune.read_rows import task_splits
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.plan import Planned
from frozencore_lab.campaign.results import measured_seconds, tally
from frozencore_lab.campaign.shared_moments import moments_key
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place


@dataclass(frozen=True)
class SearchRows:
    """The numbers of rows of one task's trials, and the source of the scored ones; or why they are ``unseen`` here."""

    task: str
    studies: tuple[str, ...]
    trained: int | None = None
    scored: int | None = None
    source: str = ""
    unseen: str = ""


def search_rows(planned: Iterable[Planned], place: Place) -> list[SearchRows]:
    """The rows of every task with a search.

    Raises:
        NoRowsError: A task leaves no rows for a search; the message names task and study.
    """
    studies: dict[tuple[object, ...], list[str]] = {}
    configs: dict[tuple[object, ...], RunConfig] = {}
    for run in planned:
        if run.phase == "search" and run.job and run.job.config.rows.task is not None:
            config = place.put(run.job.config)
            which = (config.rows.task, config.rows.num_train, config.rows.num_evaluation)
            configs.setdefault(which, config)
            studies.setdefault(which, []).append(run.study)
    found = []
    for key, config in configs.items():
        task, own = str(config.rows.task), tuple(dict.fromkeys(studies[key]))
        try:
            splits = task_splits(config.rows, config.scoring)
            found.append(SearchRows(task, own, len(splits.train), len(splits.validation), splits.validation_from))
        except NoRowsError as error:
            raise NoRowsError(f"Study {own[0]!r} searches on task {task!r}, but has no rows for it: {error}") from error
        except DataError as error:
            found.append(SearchRows(task, own, unseen=str(error)))
    return found


EFFICIENCY = 0.3  # share of a matrix product's speed that small batches reach, including Python
START_S = 15.0  # processor time of a worker's imports (torch, transformers, PEFT), before loading the model
OVERHEAD_S = 2.0  # per run: rows, checkpoints, records
OWN_DATA = {"epochs": 1, "num_train": 1000, "num_evaluation": 500}  # assumed, because a user's file is not read
RECORD_BYTES = 100_000  # record and predictions


def estimate_lines(planned: Sequence[Planned], store: Store, place: Place) -> Iterator[str]:
    """Estimate the time, memory and disk of the runs that are left."""
    jobs = {run.job.id: run.job for run in planned if run.job and store.outcome(run.job.id) is None}
    if not jobs:
        return
    try:
        models = {job.config.model.name: place.put(job.config).model.name for job in jobs.values()}
        sizes = {name: size_of(load_config(model)) for name, model in models.items()}
    except ModelError as error:
        yield f"No estimate: {error}"
        return
    left, measured = tally(planned, store).left, measured_seconds(planned, store)
    speed = operations_per_s(place.device) * EFFICIENCY
    each = mean(measured or [run_seconds(job, sizes[job.config.model.name], speed) for job in jobs.values()])
    basis = f"as {len(measured)} finished runs took" if measured else f"at {speed / 1e9:.0f} Gop/s"
    moments = {moments_key(job.config): job.config for job in jobs.values() if job.config.method.moments_needed}
    shared = sum(moment_bytes(config, sizes[config.model.name]) for config in moments.values())
    memory = max(memory_bytes(job.config, sizes[job.config.model.name]) for job in jobs.values())
    yield (
        f"Estimate for the {num_of(left, 'run')} left: {time_in_words(each * left + START_S)} on one worker "
        f"({basis}, {TOKENS_A_ROW} tokens a row), {bytes_in_words(memory)} of memory a worker, "
        f"{bytes_in_words(shared + left * RECORD_BYTES)} of disk."
    )


def operations_per_s(device: str) -> float:
    """Floating-point operations a second of a matrix product, measured for a tenth of a second.

    Args:
        device: As ``--device``; of several the first. If only other machines have it, the CPU is measured.
    """
    try:
        place = place_of(device.split(",")[0])
    except ConfigError:
        place = torch.device("cpu")
    size, rounds = (4096 if place.type == "cuda" else 512), 0
    a = torch.ones(size, size, device=place, dtype=torch.bfloat16 if place.type == "cuda" else torch.float32)
    float((a @ a)[0, 0])
    started = time.perf_counter()
    while time.perf_counter() - started < 0.1:
        float((a @ a)[0, 0])
        rounds += 1
    return 2 * size**3 * rounds / (time.perf_counter() - started)


def run_seconds(job: Job, size: ModelSize, speed: float) -> float:
    """Seconds of one run: 4 operations a weight and token of a frozen model's training pass, 2 of a scoring pass."""
    rows = OWN_DATA | job.resolved
    trained = rows["num_train"] * rows["epochs"] if job.kind.trains else 0
    scored = 2 * rows["num_evaluation"] if job.kind.trains else 0
    calibrated = job.config.rows.calibration_size if job.config.method.moments_needed else 0
    tokens = TOKENS_A_ROW * (4 * (trained + calibrated) + 2 * scored)
    return OVERHEAD_S + tokens * size.num_parameters / speed
