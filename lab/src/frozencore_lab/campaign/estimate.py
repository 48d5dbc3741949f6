"""Estimate a campaign's needs before it starts: rows of the searches, time, memory, disk.

Operations are counted from shapes: a training token takes a forward and a backward pass through frozen weights, 4
operations a weight; a scored token takes 2. The machine's speed is measured on a short matrix product. Finished runs
give the time of other runs of their kind. ``EFFICIENCY`` is an assumption.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean

import torch

from frozencore.errors import DataError, FrozenCoreError, ModelError, NoRowsError
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.costs import basis_bytes
from frozencore.tune.run.models import (
    TOKENS_A_ROW,
    ModelSize,
    load_config,
    load_tokenizer,
    memory_bytes,
    moment_bytes,
    size_of,
)
from frozencore.tune.run.read_rows import task_splits
from frozencore.tune.suite import find_task
from frozencore.words import bytes_in_words, num_of, time_in_words
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.plan import Planned
from frozencore_lab.campaign.results import measured_seconds, tally
from frozencore_lab.campaign.shared_moments import moments_key
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place

_DECIDES_SPLITS = ("task", "num_train", "num_evaluation")


@dataclass(frozen=True)
class SearchRows:
    """The rows of one task's trials.

    Attributes:
        studies: The studies whose searches have these trials.
        trained, scored, source: The numbers of rows, and the source of the scored rows; None and empty if ``unseen``.
        unseen: The reason if the rows cannot be read here.
    """

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
        if run.phase == "search" and run.job and run.job.config.task is not None:
            config = place.put(run.job.config)
            key = tuple(getattr(config, name) for name in _DECIDES_SPLITS)
            configs.setdefault(key, config)
            studies.setdefault(key, []).append(run.study)
    return [_rows_of_trials(config, tuple(dict.fromkeys(studies[key]))) for key, config in configs.items()]


def _rows_of_trials(config: RunConfig, studies: Sequence[str]) -> SearchRows:
    task = str(config.task)
    try:
        splits = task_splits(config)
    except NoRowsError as error:
        raise NoRowsError(f"Study {studies[0]!r} searches on task {task!r}, but has no rows for it: {error}") from error
    except DataError as error:
        return SearchRows(task, tuple(studies), unseen=str(error))
    return SearchRows(task, tuple(studies), len(splits.train), len(splits.validation), splits.validation_from)


SAMPLED_ROWS = 32
EFFICIENCY = 0.3  # share of a matrix product's speed that small batches reach, including Python

START_S = 15.0  # processor time of a worker's imports (torch, transformers, PEFT), before loading the model
OVERHEAD_S = 2.0  # per run: rows, checkpoints, records
OWN_DATA = {"epochs": 1, "num_train": 1000, "num_evaluation": 500}  # assumed, because a user's file is not read
RECORD_BYTES = 100_000  # record and predictions


def estimate_lines(planned: Sequence[Planned], store: Store, place: Place) -> Iterator[str]:
    """Describe the time, memory and disk of the remaining runs."""
    jobs = {run.job.id: run.job for run in planned if run.job and store.outcome(run.job.id) is None}
    left = tally(planned, store).left
    if not jobs:
        return
    configs = {job.config.model: place.put(job.config) for job in jobs.values()}
    try:
        sizes = {name: size_of(load_config(config.model)) for name, config in configs.items()}
    except ModelError as error:
        yield f"No estimate: {error}"
        return
    speed = operations_per_s(place.device)
    tasks = {(job.config.model, job.config.task): place.put(job.config) for job in jobs.values()}
    tokens = {key: tokens_a_row(config) for key, config in tasks.items()}
    seconds = [
        run_seconds(job, sizes[job.config.model], tokens[job.config.model, job.config.task], speed)
        for job in jobs.values()
    ]
    measured = measured_seconds(planned, store)
    each = mean(measured) if measured else mean(seconds)
    basis = f"as {len(measured)} finished runs took" if measured else f"at {speed * EFFICIENCY / 1e9:.0f} Gop/s"
    memory = max(memory_bytes(job.config, sizes[job.config.model]) for job in jobs.values())
    disk = shared_bytes(jobs.values(), sizes) + left * RECORD_BYTES
    starts = 1 + sum(job.kind.is_alone for job in jobs.values())  # each alone in a new process
    started = "it has started" if starts == 1 else f"its {starts} processes have started"
    yield (
        f"Estimate for the {num_of(left, 'run')} left: {time_in_words(each * left + START_S * starts)} on one worker, "
        f"{time_in_words(START_S * starts)} of it until {started} "
        f"({basis}, {mean(tokens.values()):.0f} tokens a row), {bytes_in_words(memory)} of memory a worker, "
        f"{bytes_in_words(disk)} of disk."
    )


def operations_per_s(device: str) -> float:
    """Floating-point operations a second of a matrix product, measured for a tenth of a second."""
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    size, rounds = (4096 if place.type == "cuda" else 512), 0
    a = torch.ones(size, size, device=place, dtype=torch.bfloat16 if place.type == "cuda" else torch.float32)
    float((a @ a)[0, 0])
    started = time.perf_counter()
    while time.perf_counter() - started < 0.1:
        float((a @ a)[0, 0])
        rounds += 1
    return 2 * size**3 * rounds / (time.perf_counter() - started)


def tokens_a_row(config: RunConfig) -> float:
    """Mean tokens of a task's first training rows; ``TOKENS_A_ROW`` if they cannot be read here."""
    try:
        tokenizer = load_tokenizer(config.model)
        encoder = PromptEncoder(tokenizer, style=config.prompt_style, too_long="truncate", today=config.prompt_date)
        task = find_task(config.task or "")
        rows = islice(iter(task.source.rows("train", config.data_root)), SAMPLED_ROWS)
        texts = [encoder.render(task.to_example(row, str(index))) for index, row in enumerate(rows)]
        short = [text for text, fit in zip(texts, encoder.fits(texts), strict=True) if fit != "too long"]
        return mean(len(row.input_ids) for row in encoder.training_rows(short)) if short else TOKENS_A_ROW
    except FrozenCoreError:
        return TOKENS_A_ROW


def run_seconds(job: Job, size: ModelSize, row_tokens: float, speed: float) -> float:
    """Seconds of one run from its operations."""
    config = job.config
    rows = OWN_DATA | job.resolved
    trained, scored = rows["num_train"] * rows["epochs"], (2 + num_choices(job)) * rows["num_evaluation"]
    if not job.kind.trains:
        trained = scored = 0
    calibrated = config.calibration_size if config.moments_needed else 0
    operations = row_tokens * size.num_parameters * (4 * (trained + calibrated) + 2 * scored)
    return OVERHEAD_S + operations / (speed * EFFICIENCY)


def num_choices(job: Job) -> int:
    """The number of times that validation rows are scored; each takes about as long as the evaluation."""
    every, rows = job.config.select_checkpoint, OWN_DATA | job.resolved
    if every in ("none", "epoch"):
        return rows["epochs"] if every == "epoch" else 0
    steps_an_epoch = math.ceil(rows["num_train"] / job.config.rows_a_step)
    return math.ceil(rows["epochs"] * steps_an_epoch / int(every))


def shared_bytes(jobs: Iterable[Job], sizes: Mapping[str, ModelSize]) -> int:
    """Bytes of the moments and bases that runs share."""
    files: dict[str, int] = {}
    for job in jobs:
        size = sizes[job.config.model]
        if job.config.moments_needed:
            key = moments_key(job.config)
            files[key] = max(files.get(key, 0), moment_bytes(job.config, size))
        elif job.config.method_entry.weights_only:
            files[f"{job.config.model} {job.config.method}"] = basis_bytes(size.shapes, job.config.rank, torch.float32)
    return sum(files.values())
