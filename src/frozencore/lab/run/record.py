"""The record of a finished run: its configuration, scores, costs, hashes, and where it was made."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from warnings import WarningMessage

from torch import nn

from frozencore.adapter.bases.calibrate import Calibration
from frozencore.lab.run.accounting import FLOAT32_BYTES, peak_memory_bytes, trainable_parameters, training_state_bytes
from frozencore.lab.run.bench import Bench, Score
from frozencore.lab.run.config import RunConfig
from frozencore.lab.run.provenance import provenance
from frozencore.lab.run.rows import RunRows
from frozencore.lab.training.recipe import TrainingReport

RECORD_FORMAT = 1


@dataclass(frozen=True)
class Outcome:
    """What a run has made: the trained model, its saved adapter, what calibration found (if data were read), and the
    score."""

    model: nn.Module
    adapter: Path
    calibration: Calibration | None
    calibration_s: float
    training: TrainingReport
    score: Score


def make_record(
    config: RunConfig,
    bench: Bench,
    outcome: Outcome,
    *,
    resolved: Mapping[str, Any],
    hashes: Mapping[str, str],
    warned: Sequence[WarningMessage],
    started: float,
) -> dict[str, Any]:
    """What ``result.json`` holds.

    Args:
        resolved: What the configuration left open, as it was decided.
        started: ``time.perf_counter()`` when the run began.
    """
    assert bench.before is not None
    resources = _resources(config, outcome)
    report = outcome.training
    return {
        "format": RECORD_FORMAT,
        "config": config.model_dump(mode="json"),
        "task": config.task,
        "method": config.method,
        "seed": config.seed,
        "rows": _rows(config, bench.rows),
        **_scores(bench.before, outcome.score),
        **{name: resources[name] for name in ("trainable_parameters", "adapter_bytes", "calibration_s")},
        "training_s": report.time_s,
        "total_s": time.perf_counter() - started,
        "peak_memory_bytes": resources["peak_memory_bytes"],
        "resources": resources,
        "training": {"num_steps": report.num_steps, "final_loss": report.final_loss, "losses": report.losses},
        "resolved": resolved,
        "calibration": _calibration_summary(outcome.calibration),
        "hashes": hashes,
        "warnings": sorted({str(warning.message) for warning in warned}),
        "provenance": provenance(),
    }


def headline(score: Score) -> dict[str, float]:
    """The scores that the model card shows."""
    accuracy = {"accuracy": score.task.accuracy} if score.task else {}
    return {**accuracy, "held-out nats per token": score.held_out_loss}


def calibrated_on(config: RunConfig, bench: Bench, calibration: Calibration | None) -> str | None:
    """What the model card says of the calibration data; None where none were read."""
    if calibration is None:
        return None
    source = config.task or (config.data.name if config.data else "rows of the user")
    num_tokens = next(iter(calibration.layers.values())).num_tokens
    return f"{len(bench.rows.calibration)} rows of {source}, {num_tokens:,} tokens"


def _rows(config: RunConfig, rows: RunRows) -> dict[str, Any]:
    """How many rows were trained and scored on, and which."""
    return {
        "trained": len(rows.train),
        "scored": len(rows.held_out),
        "scored_on": config.evaluate_on,
        "validation_from": rows.validation_from,
    }


def _scores(before: Score, after: Score) -> Mapping[str, Any]:
    scores: dict[str, Any] = {"held_out_loss_before": before.held_out_loss, "held_out_loss": after.held_out_loss}
    if before.task and after.task:
        details = {key: value for key, value in vars(after.task).items() if key != "predictions"}
        scores |= {"accuracy_before": before.task.accuracy, "accuracy": after.task.accuracy, "score": details}
    return scores


def _resources(config: RunConfig, outcome: Outcome) -> dict[str, Any]:
    """What the method cost, in the terms of the paper's tables."""
    trained = trainable_parameters(outcome.model)
    stored = sum(file.stat().st_size for file in outcome.adapter.glob("*.safetensors"))
    return {
        "trainable_parameters": trained,
        "magnitude_parameters": sum(p.numel() for name, p in outcome.model.named_parameters() if "magnitude" in name),
        "optimizer_bytes": training_state_bytes(trained),
        "adapter_bytes": stored,
        "adapter_bytes_without_bases": stored if config.is_baseline else FLOAT32_BYTES * trained,
        "calibration_s": outcome.calibration_s,
        "step_s": outcome.training.step_s,
        "num_steps": outcome.training.num_steps,
        "peak_memory_bytes": peak_memory_bytes(),
    }


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
