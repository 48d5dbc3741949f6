"""Execute one run: calibrate a basis, train the core, score before and after, save the adapter, then the record."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftModel

from frozencore.adapter.bases import basis_fingerprint
from frozencore.adapter.saved.card import write_model_card
from frozencore.errors import DivergenceError, ModelError
from frozencore.files.fingerprint import fingerprint_model
from frozencore.files.whole_file import write_json, write_lines
from frozencore.maths.capture import Capture
from frozencore.ranks import all_ranks_or_none, from_first, num_ranks, own_rank
from frozencore.tune.config import RunConfig
from frozencore.tune.run.adapt import Adapt, adapt_from_data, adapter_of, on_named_basis
from frozencore.tune.run.costs import PeakMemory
from frozencore.tune.run.make_record import calibrated_on, headline, make_record
from frozencore.tune.run.models import resolve_targets
from frozencore.tune.run.prepare import PreparedRun, Score, prepare
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.run.run_cache import RunCache
from frozencore.tune.run.run_folder import (
    ADAPTER,
    BASE_SCORE,
    CACHE,
    CHECKPOINTS,
    PREDICTIONS,
    RECORD,
    SAMPLES,
    refuse_used,
)
from frozencore.tune.run.scores import samples_of, score_run, selection_of
from frozencore.tune.run.training_port import Outcome, Training, recipe_of
from frozencore.tune.training.reporting import reporting, require_reporters
from frozencore.tune.training.train import train
from frozencore.words import Progress, as_stage

DECIDE_SCORE = ("task", "max_length", "evaluate_on", "max_new_tokens", "samples", "exact_match", "forgetting")
LAST_GOOD = "last-good-adapter"  # beside the checkpoints of a training that diverged

MeasureBases = Callable[[RunConfig, PreparedRun, PeftModel, Progress], Mapping[str, Capture]]
"""Measure by layer how much of the moments is captured by bases that were built without data; empty if unknown."""


def execute(
    config: RunConfig,
    out: Path,
    progress: Progress,
    *,
    prepared: PreparedRun | None = None,
    resume: bool = False,
    moments_file: Path | None = None,
    adapt: Adapt | None = None,
    measure: MeasureBases | None = None,
) -> TunedRecord:
    """Run a configuration and write ``out/``: the adapter, predictions, and last of all ``result.json``.

    Args:
        prepared: Inputs already loaded by :func:`prepare`; the run changes its model.
        resume: Continue an interrupted run in ``out`` from its base score, bases and newest complete checkpoint.
        moments_file: See :func:`adapt_from_data`.
        adapt: Makes the adapter and its bases; by default :func:`adapt_from_data`, whose result is stored for resuming.
        measure: Measures the captures of a method without calibration; its time is not counted.

    Returns:
        The written record.

    Raises:
        FrozenCoreError: The input is bad, the folder holds a finished or interrupted run, or training diverged.
    """
    with all_ranks_or_none():  # no process writes before all have checked
        refuse_used(out, resume=resume)
        require_reporters(config.training.report_to or ())
        config = on_named_basis(config)
        started, is_first = time.perf_counter(), own_rank() == 0
        prepared = prepared or prepare(config, progress)
        recipe_of(config, prepared.rows, prepared.model).of_each(
            num_ranks()
        )  # refuses a step that cannot be shared evenly
    targets = resolve_targets(config.method, prepared.model)
    progress("hash", 0, 1)
    hashes = {"model": fingerprint_model(prepared.model), **prepared.rows.fingerprints}
    progress("hash", 1, 1)
    cache = RunCache(out, reads_only=not is_first)
    prepared.before = prepared.before or from_first(
        lambda: cache.load_or_compute(
            BASE_SCORE,
            Score,
            scored_as(config, hashes),
            lambda: score_run(config.scoring, prepared.model, prepared, as_stage(progress, "score base")),
        )
    )
    memory = PeakMemory(prepared.model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with memory.phase("calibration"), cache.removed_if_refused():
            method, identity = config.method.entry, adapter_of(config, targets, hashes)
            adapting = time.perf_counter()
            if adapt is not None:
                model, calibration = adapt(config, prepared, targets, progress)
                calibration_s = time.perf_counter() - adapting
            else:
                own = partial(adapt_from_data, config, prepared, targets, progress, moments_file)
                model, calibration, calibration_s = cache.load_or_build_adapter(identity, prepared, method, own, caught)
        captures = (
            calibration.captures if calibration else measure(config, prepared, model, progress) if measure else {}
        )
    if is_first:
        out.mkdir(parents=True, exist_ok=True)
        method.keep_start(model, out / "start")
    with reporting(config.training.report_to or (), out, config.content()) as reports:
        training = Training(
            config, prepared, model, targets, out, hashes, memory, started, progress, identity, calibration,
            calibration_s, captures, caught, resume, reports,
        )  # fmt: skip
        try:
            with memory.phase("training"):
                outcome = train_alone(training)
        except DivergenceError as error:
            if not (method.has_bases and is_first):
                raise
            method.save(model, out / LAST_GOOD, out / "start")
            raise DivergenceError(f"{error} The last good core is in {out / LAST_GOOD}.") from error
        record = from_first(lambda: finish(outcome))
        if reports is not None:
            reports.tell(record.scores)
    return record


def scored_as(config: RunConfig, hashes: Mapping[str, str]) -> dict[str, Any]:
    """The inputs that determine a base model's score, as JSON values by name."""
    asked = config.content()
    return {
        **{name: asked[name] for name in DECIDE_SCORE},
        "base model": hashes["model"],
        "evaluation": hashes["evaluation"],
        "others": hashes.get("others"),
    }


def train_alone(training: Training) -> Outcome:
    """Train an adapter alone, by the configured recipe."""
    config, prepared = training.config, training.prepared
    report = train(
        training.model,
        prepared.rows.train,
        recipe_of(config, prepared.rows, prepared.model),
        pad_id=prepared.encoder.pad_id,
        checkpoint_dir=training.folder / CHECKPOINTS,
        checkpoint_steps=config.training.save_steps,
        resume=training.resume,
        identity=training.identity,
        selection=selection_of(config.scoring, prepared, training.progress),
        reports=training.reports,
        progress=training.progress,
    )
    return Outcome(training, report)


def finish(outcome: Outcome) -> TunedRecord:
    """Score, save and record a trained run, and remove the files that only resuming needs.

    Raises:
        DivergenceError: The trained model's loss on the rows is not finite.
    """
    training = outcome.training
    config, prepared, out, model = training.config, training.prepared, training.folder, training.model
    method = config.method.entry
    try:
        with training.memory.phase("scoring"):
            after = score_run(config.scoring, model, prepared, as_stage(training.progress, "score"))
    except ModelError as error:  # the same rows were scored before training
        raise DivergenceError(
            f"Training diverged: {error} Lower the learning rate ({config.resolved_learning_rate})."
        ) from error
    method.save(model, out / ADAPTER, out / "start")
    basis = {"basis": basis_fingerprint(model)} if method.has_bases else {}
    record = make_record(outcome, after, {**training.hashes, **basis})
    if method.has_bases:
        said = calibrated_on(config, prepared, training.calibration)
        write_model_card(out / ADAPTER, calibration=said, scores=headline(after))
    if after.task is not None:
        write_lines(out / PREDICTIONS, map(asdict, after.task.predictions))
    assert prepared.before is not None
    if after.samples:
        write_lines(out / SAMPLES, samples_of(prepared, prepared.before.samples, after.samples))
    write_json(out / RECORD, record.content())
    for left in (CHECKPOINTS, CACHE, "start"):  # not needed once the record is written
        shutil.rmtree(out / left, ignore_errors=True)
    return record
