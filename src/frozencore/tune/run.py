"""One run: load, read rows, score, adapt, train, score, save the adapter, and last of all write the record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter
from torch import nn

from frozencore.adapter.basis import read_header
from frozencore.adapter.card import write_model_card
from frozencore.adapter.core import Core
from frozencore.adapter.loaded_basis import basis_id
from frozencore.adapter.swap import get_core, round_core, swap_core
from frozencore.distributed import broadcast_from_rank0, num_ranks, own_rank, raise_on_any_rank
from frozencore.errors import ConfigError, DivergenceError, ModelError
from frozencore.files.atomic_write import write_json, write_lines, write_text
from frozencore.files.fingerprint import fingerprint_tensors, fingerprints_of
from frozencore.files.names import ADAPTER
from frozencore.options import fingerprint_options
from frozencore.progress import Progress, as_stage
from frozencore.tune.adapt import (
    Adapted,
    Precomputed,
    adapt,
    load_start,
    on_named_basis,
    save_start,
    starting_core,
    undone_by_rounding,
    with_rate,
)
from frozencore.tune.adapters import save_adapter
from frozencore.tune.config import RunConfig, as_json
from frozencore.tune.config_parts import ScoringConfig, TrainingConfig
from frozencore.tune.cost import PeakMemory, rows_at_once
from frozencore.tune.figures import write_curve
from frozencore.tune.folder import (
    BASE_SCORE,
    CALIBRATION,
    CHECKPOINTS,
    FIGURE,
    PREDICTIONS,
    RECORD,
    SAMPLES,
    START,
    begin,
    claimed,
    remove_work,
    removed_if_refused,
)
from frozencore.tune.load import Inputs, prepare, resolve_targets
from frozencore.tune.make_record import calibrated_on, headline, make_record
from frozencore.tune.methods import Method, MethodConfig
from frozencore.tune.provenance import STEPS_VERSION
from frozencore.tune.record import TunedRecord
from frozencore.tune.run_rows import RunRows
from frozencore.tune.scores import samples_of, score_run, selection_of
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.scoring.score import Score
from frozencore.tune.training.recipe import Recipe, epochs_for, require_reporters
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import overhead_tokens_of

CHOOSE_STEP = {"select_checkpoint", "select_by", "patience"}  # the options of scoring that no base score depends on


def execute(
    config: RunConfig,
    out: Path,
    progress: Progress,
    *,
    resume: bool = False,
    inputs: Inputs | None = None,
    base_scores: MutableMapping[str, Score] | None = None,
    precomputed: Precomputed | None = None,
) -> TunedRecord:
    """Run a configuration and write ``out/``: the options first, the record ``result.json`` last.

    Args:
        resume: Continue an interrupted run in ``out`` from its base score, bases and newest complete checkpoint.
        inputs: The model and rows, loaded before. The run takes its adapter off again, but a method may have changed
            the model.
        base_scores: The base scores of earlier runs, by their inputs; that of this run is added.
        precomputed: Moments or bases of earlier runs.

    Returns:
        The written record.

    Raises:
        FrozenCoreError: The input is bad, the folder holds a finished or interrupted run, another process uses it, a
            resumed run has other options or inputs, or training diverged.
    """
    started, is_first, is_lent, given = time.perf_counter(), own_rank() == 0, inputs is not None, config
    with ExitStack() as stack:
        with raise_on_any_rank():  # no process writes before all have checked
            stack.enter_context(claimed(out, given, resume=resume))
            require_reporters(config.training.report_to or ())
            config = on_named_basis(config)
            start = starting_core(config.method)
            inputs = inputs or prepare(config.model, config.rows, config.scoring, progress)
            recipe = recipe_of(config.training, config.method.entry, inputs.rows, inputs.model)
            recipe.of_each(num_ranks())  # refuses a step that cannot be shared evenly
        method, targets = config.method.entry, resolve_targets(config.method, inputs.model)
        hashes = _hashes(inputs, start, progress)
        with removed_if_refused(out) if is_first and not resume else nullcontext():
            decides = hashes | _hashes_of_steps(config.method, recipe)
            broadcast_from_rank0(lambda: begin(out, given, decides, resume=resume))
            before = _score_base(config.scoring, inputs, hashes, out, base_scores, progress)
            memory = PeakMemory(inputs.model)
            if broadcast_from_rank0(lambda: (out / START / CALIBRATION).is_file()):
                adapted = load_start(inputs.model, targets, out / START)
            else:
                adapted = adapt(
                    config.method, inputs, targets, progress, measure_rate=recipe.learning_rate is None,
                    precomputed=precomputed,
                )  # fmt: skip
                if is_first:
                    save_start(adapted, method, out / START)

        recipe = with_rate(recipe, adapted.model, inputs.encoder.pad_id, inputs.rows.train, progress)
        if start is not None:
            swap_core(adapted.model, start)
        report = train(
            adapted.model, inputs.rows.train, recipe, pad_id=inputs.encoder.pad_id,
            checkpoint_dir=out / CHECKPOINTS, checkpoint_steps=config.training.save_steps, resume=resume,
            selection=selection_of(config.scoring, inputs, progress), report_to=config.training.report_to or (),
            progress=progress,
        )  # fmt: skip

        def finish() -> TunedRecord:
            core: Core | None = None
            undone: tuple[str, ...] = ()
            with scoring_trained(recipe):
                if method.has_bases:
                    trained = get_core(adapted.model)
                    core = round_core(adapted.model, config.method.saved_bits)
                    undone = undone_by_rounding(start, trained, core)
                after = score_run(adapted.model, inputs, config.scoring, as_stage(progress, "score"))
            _save(config, inputs, adapted, (before, after), out, core)
            basis = {"basis": basis_id(adapted.model)} if method.has_bases else {}
            record = make_record(
                config, inputs, adapted, recipe, report, (before, after), core=core, hashes=hashes | basis, folder=out,
                memory=memory, started=started, warnings=undone,
            )  # fmt: skip
            write_curve(record, out / FIGURE)
            write_json(out / RECORD, record.content())
            remove_work(out)
            return record

        record = broadcast_from_rank0(finish)
    if is_lent and not method.changes_base:
        unload_adapter(adapted.model)
    return record


def _hashes(inputs: Inputs, start: Core | None, progress: Progress) -> dict[str, str]:
    """SHA-256 of the base model, its configuration, the sets of rows, and the core that training starts from."""
    progress("hash", 0, 1)
    hashes = {**fingerprints_of(inputs.model), **inputs.rows.fingerprints}
    if start is not None:
        hashes["start"] = fingerprint_tensors(start.tensors.items())
    progress("hash", 1, 1)
    return hashes


def _hashes_of_steps(method: MethodConfig, recipe: Recipe) -> dict[str, str]:
    """The id of the named basis, and a hash of what determines each step: a resumed run must have the same."""
    basis = {} if method.basis is None else {"basis": read_header(method.basis).id}
    return basis | {"recipe": fingerprint_options({"version": STEPS_VERSION, **recipe.of_steps()})}


def _save(
    config: RunConfig, inputs: Inputs, adapted: Adapted, scores: tuple[Score, Score], out: Path, core: Core | None
) -> None:
    """Write the adapter with its card, the answers to the scored rows, and the samples.

    Args:
        core: The rounded core that the model has; None where no value was rounded.
    """
    (before, after), method = scores, config.method.entry
    save_adapter(method, adapted.model, out / ADAPTER, out / START, core)
    if method.has_bases:
        rows = calibrated_on(config, inputs.rows, adapted.made.calibration)
        write_model_card(out / ADAPTER, calibration=rows, scores=headline(after))
    if after.task is not None:
        write_lines(out / PREDICTIONS, map(asdict, after.predictions))
    if after.samples:
        write_lines(out / SAMPLES, samples_of(inputs, before.samples, after.samples))


def recipe_of(config: TrainingConfig, method: Method, rows: RunRows, model: nn.Module) -> Recipe:
    """Make the recipe of a run, with the defaults of its method and task.

    Training on eight rows at once was 1.4 to 3.6 times as fast as on one row at a time (a CPU core, models of a million
    parameters, rows of 10 to 60 tokens, of one or many lengths).

    Args:
        model: Determines how many rows fit at once, if the batch size is ``auto``.
    """
    overhead_tokens, batch_size, accumulation = None, config.batch_size, config.accumulation
    if batch_size == "auto":
        overhead_tokens = overhead_tokens_of(model)
        batch_size = rows_at_once(config.effective_batch_size, max(row.num_tokens for row in rows.train), model)
        accumulation = config.effective_batch_size // batch_size
    default_epochs = rows.epochs or epochs_for(len(rows.train), config.effective_batch_size)
    return Recipe(
        learning_rate=config.rate_of(method),
        warmup=config.warmup_of(method),
        epochs=config.epochs or default_epochs,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=config.seed,
        overhead_tokens=overhead_tokens,
    )


def _score_base(
    config: ScoringConfig,
    inputs: Inputs,
    hashes: Mapping[str, str],
    out: Path,
    earlier: MutableMapping[str, Score] | None,
    progress: Progress,
) -> Score:
    """The score of the base model: of an earlier run, of this run before an interruption, or computed."""
    known = {} if earlier is None else earlier
    decides = {
        **{name: as_json(value) for name, value in vars(config).items() if name not in CHOOSE_STEP},
        "rows": inputs.rows.scored.name,
        "max_length": inputs.encoder.max_length,
        **{name: hashes.get(name) for name in ("model", "evaluation", "choices", "others")},
    }
    key, file, kind = fingerprint_options(decides), out / BASE_SCORE, TypeAdapter(Score)

    def load_or_score() -> Score:
        if file.is_file():
            return kind.validate_json(file.read_text(), strict=False)
        score = known.get(key) or score_run(inputs.model, inputs, config, as_stage(progress, "score base"))
        write_text(file, json.dumps(kind.dump_python(score, mode="json")))
        return score

    known[key] = broadcast_from_rank0(load_or_score)
    return known[key]


@contextmanager
def scoring_trained(recipe: Recipe) -> Iterator[None]:
    """Round or score what was trained inside: if values or outputs are too large, the training diverged.

    Raises:
        DivergenceError: In place of a ``ModelError`` or ``ConfigError`` from inside.
    """
    try:
        yield
    except (ModelError, ConfigError) as error:  # the same rows were scored before, and the bits are known
        raise DivergenceError(
            f"Training diverged: {error} Lower the learning rate ({recipe.learning_rate})."
        ) from error
