"""One run: load, read rows, score, adapt, train, score, save the adapter, and last of all write the record."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from peft import PeftModel
from torch import nn

from frozencore.adapter.bases import basis_fingerprint
from frozencore.adapter.saved.card import write_model_card
from frozencore.distributed import all_ranks_or_none, from_first, num_ranks, own_rank
from frozencore.errors import DivergenceError, ModelError
from frozencore.files.fingerprint import fingerprint_model, fingerprint_options
from frozencore.files.whole_file import write_json, write_lines
from frozencore.text import Progress, as_stage
from frozencore.tune.adapt import Shared, adapt, adapter_identity, on_named_basis
from frozencore.tune.cache import RunCache
from frozencore.tune.config import RunConfig, ScoringConfig, TrainingConfig
from frozencore.tune.cost import PeakMemory, rows_at_once
from frozencore.tune.folder import (
    ADAPTER,
    BASE_SCORE,
    CACHE,
    CHECKPOINTS,
    LAST_GOOD,
    PREDICTIONS,
    RECORD,
    SAMPLES,
    START,
    locked,
    refuse_used,
)
from frozencore.tune.load import Inputs, prepare, resolve_targets
from frozencore.tune.make_record import AdaptedRun, FinishedRun, calibrated_on, headline, make_record
from frozencore.tune.methods import Method
from frozencore.tune.read_rows import RunRows
from frozencore.tune.record import TunedRecord
from frozencore.tune.scores import Score, samples_of, score_run, selection_of
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.training.recipe import Recipe, epochs_for
from frozencore.tune.training.reporting import reporting, require_reporters
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import pass_tokens_of

CHOOSE_STEP = {"select_checkpoint", "select_by", "patience"}  # the options of scoring that no base score depends on


def execute(
    config: RunConfig,
    out: Path,
    progress: Progress,
    *,
    resume: bool = False,
    moments_file: Path | None = None,
    inputs: Inputs | None = None,
    base_scores: MutableMapping[str, Score] | None = None,
    shared: Shared | None = None,
) -> TunedRecord:
    """Run a configuration and write ``out/``: the adapter, predictions, and last of all ``result.json``.

    Args:
        resume: Continue an interrupted run in ``out`` from its base score, bases and newest complete checkpoint.
        moments_file: Moments of ``frozencore calibrate`` in place of a new pass; they must match the run.
        inputs: The model and rows, loaded before. The run takes its adapter off again, but a method may have changed
            the model.
        base_scores: The base scores of earlier runs, by their inputs; that of this run is added.
        shared: Moments or bases of earlier runs.

    Returns:
        The written record.

    Raises:
        FrozenCoreError: The input is bad, the folder holds a finished or interrupted run, another process uses it, or
            training diverged.
    """
    started, is_first, is_lent = time.perf_counter(), own_rank() == 0, inputs is not None
    with ExitStack() as held:
        with all_ranks_or_none():  # no process writes before all have checked
            refuse_used(out, resume=resume)
            held.enter_context(locked(out) if is_first else nullcontext())
            require_reporters(config.training.report_to or ())
            config = on_named_basis(config)
            inputs = inputs or prepare(config.model, config.rows, config.scoring, progress)
            recipe = recipe_of(config.training, config.method.entry, inputs.rows, inputs.model)
            recipe.of_each(num_ranks())  # refuses a step that cannot be shared evenly
        method, targets = config.method.entry, resolve_targets(config.method, inputs.model)
        progress("hash", 0, 1)
        hashes = {"model": fingerprint_model(inputs.model), **inputs.rows.fingerprints}
        progress("hash", 1, 1)

        cache = RunCache(out, reads_only=not is_first)
        known_scores = {} if base_scores is None else base_scores
        before = _score_base(config.scoring, inputs, hashes, cache, known_scores, progress)

        memory, identity = PeakMemory(inputs.model), adapter_identity(config.method, targets, hashes)
        with warnings.catch_warnings(record=True) as warned, memory.phase("calibration"), cache.removed_if_refused():
            warnings.simplefilter("always")
            if shared:  # other runs have stored what this one needs
                adapted = adapt(config.method, inputs, targets, progress, moments_file=moments_file, shared=shared)
            else:
                adapted = cache.adapt(
                    identity, config.method, inputs, targets, progress, warned, moments_file=moments_file
                )
        if is_first:
            out.mkdir(parents=True, exist_ok=True)
            method.keep_start(adapted.model, out / START)

        model = adapted.model
        reports = held.enter_context(reporting(config.training.report_to or (), out, config.content()))
        with memory.phase("training"), _last_good_saved(method, model, out):
            report = train(
                model, inputs.rows.train, recipe, pad_id=inputs.encoder.pad_id, checkpoint_dir=out / CHECKPOINTS,
                checkpoint_steps=config.training.save_steps, resume=resume, identity=identity,
                selection=selection_of(config.scoring, inputs, progress), reports=reports, progress=progress,
            )  # fmt: skip

        def finish() -> TunedRecord:
            after = _score_trained(model, inputs, config.scoring, recipe, memory, progress)
            run = AdaptedRun(config, inputs, out, targets, hashes, adapted, memory, warned, started)
            return save_run(FinishedRun(**vars(run), recipe=recipe, report=report, before=before, after=after))

        record = from_first(finish)
        if reports is not None:
            reports.tell(record.scores)
    if is_lent and not method.changes_base:
        unload_adapter(model)
    return record


def recipe_of(config: TrainingConfig, method: Method, rows: RunRows, model: nn.Module) -> Recipe:
    """Make the recipe of a run, with the defaults of its method and task.

    Training on eight rows at once was 1.4 to 3.6 times as fast as on one row at a time (a CPU core, models of a million
    parameters, rows of 10 to 60 tokens, of one or many lengths).

    Args:
        model: Determines how many rows fit at once, if the batch size is ``auto``.
    """
    pass_tokens, batch_size, accumulation = None, config.batch_size, config.accumulation
    if batch_size == "auto":
        pass_tokens = pass_tokens_of(model)
        batch_size = rows_at_once(config.rows_a_step, max(row.num_tokens for row in rows.train), model)
        accumulation = config.rows_a_step // batch_size
    default_epochs = rows.task.epochs if rows.task else epochs_for(len(rows.train), config.rows_a_step)
    return Recipe(
        learning_rate=config.rate_of(method),
        warmup=config.warmup_of(method),
        epochs=config.epochs or default_epochs,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=config.seed,
        pass_tokens=pass_tokens,
    )


def _score_base(
    config: ScoringConfig,
    inputs: Inputs,
    hashes: Mapping[str, str],
    cache: RunCache,
    known: MutableMapping[str, Score],
    progress: Progress,
) -> Score:
    """The score of the base model: of an earlier run, of this run before an interruption, or computed."""
    task = inputs.rows.task
    of = {
        **config.model_dump(mode="json", exclude=CHOOSE_STEP),
        "task": None if task is None else task.name,
        "max_length": inputs.encoder.max_length,
        "base model": hashes["model"],
        "evaluation": hashes["evaluation"],
        "others": hashes.get("others"),
    }

    def load_or_score() -> Score:
        found: Score | None = cache.load(BASE_SCORE, Score, of)
        if found is None:
            found = score_run(inputs.model, inputs, config, as_stage(progress, "score base"))
            cache.store(BASE_SCORE, Score, of, found)
        return found

    key = fingerprint_options(of)
    if key not in known:
        known[key] = from_first(load_or_score)
    return known[key]


def _score_trained(
    model: nn.Module, inputs: Inputs, config: ScoringConfig, recipe: Recipe, memory: PeakMemory, progress: Progress
) -> Score:
    try:
        with memory.phase("scoring"):
            return score_run(model, inputs, config, as_stage(progress, "score"))
    except ModelError as error:  # the same rows were scored before training
        raise DivergenceError(
            f"Training diverged: {error} Lower the learning rate ({recipe.learning_rate})."
        ) from error


@contextmanager
def _last_good_saved(method: Method, model: PeftModel, out: Path) -> Iterator[None]:
    """If the training inside diverges, save the last good core, which the model then holds."""
    try:
        yield
    except DivergenceError as error:
        if not (method.has_bases and own_rank() == 0):
            raise
        method.save(model, out / LAST_GOOD, out / START)
        raise DivergenceError(f"{error} The last good core is in {out / LAST_GOOD}.") from error


def save_run(run: FinishedRun) -> TunedRecord:
    """Save a run, its record last of all, and remove the files that only resuming needs."""
    method, out, model = run.config.method.entry, run.folder, run.adapted.model
    method.save(model, out / ADAPTER, out / START)
    if method.has_bases:
        run = replace(run, hashes={**run.hashes, "basis": basis_fingerprint(model)})
        said = calibrated_on(run.config.method, run.config.rows, run.inputs.rows, run.adapted.calibration)
        write_model_card(out / ADAPTER, calibration=said, scores=headline(run.after))
    if run.after.task is not None:
        write_lines(out / PREDICTIONS, map(asdict, run.after.task.predictions))
    if run.after.samples:
        write_lines(out / SAMPLES, samples_of(run.inputs, run.before.samples, run.after.samples))
    record = make_record(run)
    write_json(out / RECORD, record.content())
    for left in (CHECKPOINTS, CACHE, START):
        shutil.rmtree(out / left, ignore_errors=True)
    return record
