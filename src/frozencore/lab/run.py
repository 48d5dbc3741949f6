"""One run: calibrate a basis, train the core, score before and after, save the adapter and the record."""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from frozencore.accounting import FLOAT32_BYTES, peak_memory_bytes, trainable_parameters, training_state_bytes
from frozencore.adapter.calibrate import Calibration, calibrate
from frozencore.adapter.card import write_model_card
from frozencore.calibration.collect import Batch
from frozencore.calibration.store import MomentsFingerprint, load_moments
from frozencore.errors import ArtifactError, ConfigError, ModelError, TrainingError
from frozencore.fingerprint import fingerprint_model
from frozencore.lab.baselines import save_start
from frozencore.lab.batches import make_batches
from frozencore.lab.config import RunConfig, Targets
from frozencore.lab.loading import load_model
from frozencore.lab.methods import (
    add_method,
    basis_fingerprint,
    moments_needed,
    resolve_targets,
    save_adapter,
)
from frozencore.lab.prompts import PROTOCOL_MAX_LENGTH, PromptEncoder, context_limit
from frozencore.lab.record import provenance, require_writable, write_json, write_lines
from frozencore.lab.rows import RunRows, prepare_rows
from frozencore.lab.scoring.heldout import held_out_loss
from frozencore.lab.scoring.score import TaskScore
from frozencore.lab.scoring.task_score import score_task
from frozencore.lab.training import Recipe, TrainingReport, train

RECORD_FORMAT = 1
CALIBRATION_BATCH = 8

Stages = Callable[[str, int, int | None, str], None]
"""Called with a stage's name, the steps done, their total if it is known, and a short note."""


@dataclass(frozen=True)
class Score:
    """What a model scored on the evaluation rows: nats per completion token, and the task's accuracy if it has one."""

    held_out_loss: float
    task: TaskScore | None = None


@dataclass(frozen=True)
class Base:
    """A loaded base model and its tokenizer, of any number of runs one after the other."""

    model: PreTrainedModel
    tokenizer: Any


@dataclass
class Bench:
    """A loaded model with one run's rows; the score of the untouched model is kept for runs that share them."""

    model: PreTrainedModel
    encoder: PromptEncoder
    rows: RunRows
    before: Score | None = None


Adapted = tuple[PeftModel, Calibration | None]
Adapt = Callable[[RunConfig, Bench, Targets, Stages], Adapted]
"""Puts the configured adapter on a bench's model, calibrated; what was found is None where no data were read."""


def prepare(config: RunConfig, stages: Stages, base: Base | None = None) -> Bench:
    """Load what a run needs. Every error in the input shows here, before anything is written.

    Args:
        base: The configured model, loaded before.
    """
    stages("load", 0, None, config.model)
    base = base or Base(*load_model(config.model, dtype=config.dtype, device=config.device))
    limit = context_limit(base.model, base.tokenizer)
    encoder = PromptEncoder(
        base.tokenizer,
        style=config.prompt_style,
        max_length=config.max_length or min(PROTOCOL_MAX_LENGTH, limit),
        too_long="truncate" if config.truncate else "refuse",
    )
    if encoder.max_length > limit:
        raise ConfigError(f"--max-length {encoder.max_length} is beyond the model's context of {limit} tokens.")
    rows = prepare_rows(config, encoder)
    stages("load", 1, 1, f"{len(rows.train)} training rows")
    return Bench(base.model, encoder, rows)


def execute(
    config: RunConfig,
    out: Path,
    stages: Stages,
    *,
    bench: Bench | None = None,
    resume: bool = False,
    adapt: Adapt | None = None,
) -> dict[str, Any]:
    """Run a configuration and write ``out/``: the adapter, predictions, and last of all ``result.json``.

    Args:
        bench: Loaded before by :func:`prepare`; its model is used up by the run.
        resume: Go on from the newest complete checkpoint in ``out``.
        adapt: Where the adapter and its bases come from; :func:`adapt_from_data` by default.

    Returns:
        The record that was written.

    Raises:
        FrozenCoreError: Bad input, a folder that holds a finished run, or training that diverged.
    """
    _refuse_finished(out)
    started = time.perf_counter()
    bench = bench or prepare(config, stages)
    targets = resolve_targets(config, bench.model)
    hashes = {"model": fingerprint_model(bench.model), **bench.rows.fingerprints()}
    bench.before = bench.before or _score(bench.model, bench, stages, "score base")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapting = time.perf_counter()
        model, calibration = (adapt or adapt_from_data)(config, bench, targets, stages)
        calibration_s = time.perf_counter() - adapting
    out.mkdir(parents=True, exist_ok=True)
    if config.is_baseline:
        save_start(model, out / "start")
    else:
        hashes["basis"] = basis_fingerprint(model)
    report = _train(config, model, bench, out, stages, resume=resume)
    try:
        after = _score(model, bench, stages, "score")
    except ModelError as error:  # the same rows were scored before training
        raise TrainingError(
            f"Training diverged: {error} Lower the learning rate ({config.resolved_learning_rate})."
        ) from error
    save_adapter(model, out / "adapter", out / "start")
    record = {
        "format": RECORD_FORMAT,
        "config": config.model_dump(mode="json"),
        "task": config.task,
        "method": config.method,
        "seed": config.seed,
        **_scores(bench.before, after),
        "trainable_parameters": trainable_parameters(model),
        "adapter_bytes": sum(file.stat().st_size for file in (out / "adapter").glob("*.safetensors")),
        "calibration_s": calibration_s,
        "training_s": report.time_s,
        "total_s": time.perf_counter() - started,
        "peak_memory_bytes": peak_memory_bytes(),
        "resources": _resources(config, model, out / "adapter", calibration_s, report),
        "training": {"num_steps": report.num_steps, "final_loss": report.final_loss, "losses": report.losses},
        "resolved": {
            "targets": targets,
            "recipe": asdict(_recipe(config, bench.rows)),
            "max_length": bench.encoder.max_length,
        },
        "calibration": _calibration_summary(calibration),
        "hashes": hashes,
        "warnings": sorted({str(entry.message) for entry in caught if entry.category is UserWarning}),
        "provenance": provenance(),
    }
    if not config.is_baseline:
        write_model_card(
            out / "adapter", calibration=_calibrated_on(config, bench, calibration), scores=_headline(after)
        )
    if after.task is not None:
        write_lines(out / "predictions.jsonl", map(asdict, after.task.predictions))
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    shutil.rmtree(out / "start", ignore_errors=True)
    write_json(out / "result.json", record)
    return record


def calibration_batches(rows: RunRows, pad_id: int) -> list[Batch]:
    """The calibration rows as batches of similar length, which wastes little on padding."""
    by_length = sorted(rows.calibration, key=lambda row: len(row.input_ids))
    return list(make_batches(by_length, pad_id=pad_id, batch_size=CALIBRATION_BATCH))


def adapt_from_data(
    config: RunConfig, bench: Bench, targets: Targets, stages: Stages, moments_file: Path | None = None
) -> Adapted:
    """The adapter, its bases computed from the run's calibration rows.

    Args:
        moments_file: Moments of ``frozencore calibrate`` instead of a new pass; refused if they are of anything else.
    """
    model = add_method(config, bench.model, targets)
    if not moments_needed(config):
        if moments_file:
            raise ConfigError(
                f"--moments is of no use to the method {config.method!r}, which reads no data: leave it out."
            )
        return model, None
    batches = calibration_batches(bench.rows, bench.encoder.pad_id)
    fingerprint = MomentsFingerprint.of(model, batches, config.calibration_options)
    moments = load_moments(moments_file, fingerprint) if moments_file else None
    return model, calibrate(
        model,
        batches,
        options=config.calibration_options,
        moments=moments,
        progress=lambda stage, done, total: stages(stage, done, total, ""),
    )


def _recipe(config: RunConfig, rows: RunRows) -> Recipe:
    return Recipe(
        learning_rate=config.resolved_learning_rate,
        warmup=config.warmup,
        epochs=config.epochs or (rows.task.epochs if rows.task else 1),
        batch_size=config.batch_size,
        accumulation=config.accumulation,
        seed=config.seed,
    )


def _train(
    config: RunConfig, model: nn.Module, bench: Bench, out: Path, stages: Stages, *, resume: bool
) -> TrainingReport:
    return train(
        model,
        bench.rows.train,
        _recipe(config, bench.rows),
        pad_id=bench.encoder.pad_id,
        checkpoint_dir=out / "checkpoints",
        resume=resume,
        progress=lambda done, total, note: stages("train", done, total, note),
    )


def _score(model: nn.Module, bench: Bench, stages: Stages, stage: str) -> Score:
    def progress(done: int, total: int, note: str) -> None:
        stages(stage, done, total, note)

    if bench.rows.task is None or bench.rows.task.scoring == "text":
        loss = held_out_loss(model, bench.rows.held_out, pad_id=bench.encoder.pad_id, progress=progress)
        return Score(held_out_loss=loss)
    score = score_task(model, bench.encoder, bench.rows.task, bench.rows.evaluation, progress=progress)
    return Score(held_out_loss=score.held_out_loss, task=score)


def _scores(before: Score, after: Score) -> Mapping[str, Any]:
    scores: dict[str, Any] = {"held_out_loss_before": before.held_out_loss, "held_out_loss": after.held_out_loss}
    if before.task and after.task:
        details = {key: value for key, value in vars(after.task).items() if key != "predictions"}
        scores |= {"accuracy_before": before.task.accuracy, "accuracy": after.task.accuracy, "score": details}
    return scores


def _calibrated_on(config: RunConfig, bench: Bench, calibration: Calibration | None) -> str | None:
    if calibration is None:
        return None
    source = config.task or (config.data.name if config.data else "rows of the user")
    num_tokens = next(iter(calibration.layers.values())).num_tokens
    return f"{len(bench.rows.calibration)} rows of {source}, {num_tokens:,} tokens"


def _resources(
    config: RunConfig, model: nn.Module, adapter: Path, calibration_s: float, report: TrainingReport
) -> dict[str, Any]:
    """What the method cost, in the terms of the paper's tables."""
    trained = trainable_parameters(model)
    stored = sum(file.stat().st_size for file in adapter.glob("*.safetensors"))
    return {
        "trainable_parameters": trained,
        "magnitude_parameters": sum(p.numel() for name, p in model.named_parameters() if "magnitude" in name),
        "optimizer_bytes": training_state_bytes(trained),
        "adapter_bytes": stored,
        "adapter_bytes_without_bases": stored if config.is_baseline else FLOAT32_BYTES * trained,
        "calibration_s": calibration_s,
        "step_s": report.step_s,
        "num_steps": report.num_steps,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _headline(score: Score) -> dict[str, float]:
    accuracy = {"accuracy": score.task.accuracy} if score.task else {}
    return {**accuracy, "held-out nats per token": score.held_out_loss}


def _calibration_summary(calibration: Calibration | None) -> dict[str, Any] | None:
    if calibration is None:
        return None
    layers = list(calibration.layers.values())
    spreads = {
        name: median(values)
        if (values := [v for v in (getattr(layer, name) for layer in layers) if v is not None])
        else None
        for name in ("input_spread", "error_spread")
    }
    return {
        "collect_s": calibration.collect_s,
        "build_s": calibration.build_s,
        "num_layers": len(layers),
        "num_tokens": layers[0].num_tokens,
        "smallest_effective_rank": min(layer.effective_rank for layer in layers),
        "median_spread": {
            name: value if value is None or math.isfinite(value) else None for name, value in spreads.items()
        },
    }


def _refuse_finished(out: Path) -> None:
    require_writable(out)
    if (out / "result.json").exists():
        raise ArtifactError(f"{out} already holds a finished run. Choose another --output, or remove that folder.")
