"""Make the record of a finished run, and what its model card tells."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from frozencore.adapter.calibrate import Calibration
from frozencore.adapter.saved.basis import read_header
from frozencore.distributed import num_ranks
from frozencore.maths.capture import METRIC, Capture
from frozencore.text import accuracy_in_words
from frozencore.tune.adapt import Adapted
from frozencore.tune.config import MethodConfig, RowsConfig, RunConfig, ScoredOn
from frozencore.tune.cost import FLOAT32_BYTES, PeakMemory
from frozencore.tune.folder import ADAPTER
from frozencore.tune.load import Inputs
from frozencore.tune.record import (
    RECORD_FORMAT,
    AccuracyDetails,
    Alignment,
    CalibrationSummary,
    CompanySize,
    Hashes,
    LayerAlignment,
    OtherTask,
    Provenance,
    RecordedConfig,
    RecordedLosses,
    Resolved,
    Resources,
    SelectedCheckpoint,
    TrainedSteps,
    TunedRecord,
    UsedRows,
)
from frozencore.tune.rows.row_sources import named, sources_of
from frozencore.tune.run_rows import RunRows
from frozencore.tune.scoring.score import Score
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport

NUM_LEADING = 4  # recorded singular values of a layer, beside the last
LAYER_NUMBERS = (
    "J", "energy", "gradient", "gradient_total", "effective_rank", "participation", "input_spread", "error_spread",
)  # fmt: skip
DIGITS = 6  # of the numbers of a layer, because a record may have hundreds of layers


def make_record(
    config: RunConfig,
    inputs: Inputs,
    adapted: Adapted,
    recipe: Recipe,
    report: TrainingReport,
    scores: tuple[Score, Score],
    *,
    hashes: Mapping[str, str],
    folder: Path,
    memory: PeakMemory,
    started: float,
) -> TunedRecord:
    """Make the content of ``result.json`` for a run whose adapter is saved.

    Args:
        scores: Before and after training.
        hashes: SHA-256 of the base model, of the rows and of the bases, by name.
        started: ``time.perf_counter()`` when the run began.
    """
    (before, after), rows, model = scores, inputs.rows, adapted.model
    at_once = report.values_at_once or adapted.values_at_once
    saved = sum(file.stat().st_size for file in (folder / ADAPTER).glob("*.safetensors"))
    can_be_made_again = config.method.entry.frozen_can_be_made_again
    beside = report.side_by_side
    forgetting = {
        task: OtherTask(loss_before=finite_or_none(before.others[task]), loss=finite_or_none(loss))
        for task, loss in after.others.items()
    }
    further = {
        "selection": _selection(config, report),
        "company": CompanySize(tenants=beside[0], slots=beside[1]) if beside else None,
        "forgetting": forgetting or None,
        "row_losses": _row_losses(after),
        "processes": num_ranks() if num_ranks() > 1 else None,
    }
    return TunedRecord(
        format=RECORD_FORMAT,
        config=RecordedConfig.of(config),
        task=config.rows.task,
        method=config.method.name,
        seed=config.rows.seed,
        rows=used_rows(config.rows, config.scoring.evaluate_on, rows),
        held_out_loss_before=finite_or_none(before.held_out_loss),
        held_out_loss=finite_or_none(after.held_out_loss),
        **_accuracies(before, after),
        values_at_once=at_once,
        state_held_bytes=report.state_held_bytes,
        saved_bytes=saved,
        model_bytes=adapted.model_bytes,
        calibration_s=adapted.time_s,
        training_s=report.time_s,
        total_s=time.perf_counter() - started,
        peak_memory_bytes=memory.largest,
        resources=Resources(
            magnitude_parameters=adapted.num_magnitudes,
            saved_bytes_without_bases=FLOAT32_BYTES * at_once if can_be_made_again else saved,
            step_s=report.step_s,
            peaks=memory.peaks if beside is None else None,  # its training was shared
        ),
        training=TrainedSteps(num_steps=report.num_steps, final_loss=report.final_loss, losses=report.losses),
        **_known(further),
        resolved=Resolved(
            targets=adapted.targets,
            recipe=recipe.content(),
            max_length=inputs.encoder.max_length,
            prompt_style="chat" if inputs.encoder.is_chat else "plain",
            dtype=str(inputs.model.dtype).removeprefix("torch."),
            **_known({"system": rows.system, "started_from": dict(adapted.started_from) or None}),
        ),
        calibration=_calibration_summary(adapted.calibration),
        alignment=alignment_of(adapted.captures),
        hashes=Hashes(**hashes),
        warnings=adapted.warnings,
        provenance=Provenance.here(next(model.parameters()).device),
    )


def used_rows(config: RowsConfig, scored_on: ScoredOn, rows: RunRows) -> UsedRows:
    """The record of the rows of a run."""
    read: dict[str, Any] = dict(rows.reading or ())
    if config.too_long == "cut":
        read["cut"] = rows.num_cut
    if config.too_long != "refuse":
        read["skipped"] = rows.num_skipped
    return UsedRows(
        trained=len(rows.train),
        scored=len(rows.held_out),
        scored_on=scored_on,
        validation_from=rows.validation_from,
        **_known(read),
    )


def headline(score: Score) -> dict[str, float | str]:
    """The scores that the model card shows."""
    task = score.task
    accuracy = {"accuracy": accuracy_in_words(task.accuracy, task.num_examples)} if task else {}
    return {**accuracy, "held-out nats per token": score.held_out_loss}


def calibrated_on(
    method: MethodConfig, config: RowsConfig, rows: RunRows, calibration: Calibration | None
) -> str | None:
    """Describe the calibration data for the model card; None if no data were read."""
    if method.basis is not None:
        said: str | None = read_header(method.basis)["calibrated_on"]
        return said
    if calibration is None:
        return None
    sources = " and ".join(named(source) for source in sources_of(config.data)) if config.data else ""
    source = config.calibration_task or config.task or sources or "rows of the user"
    num_tokens = next(iter(calibration.layers.values())).num_tokens
    return f"{len(rows.calibration)} rows of {source}, {num_tokens:,} tokens"


def alignment_of(captures: Mapping[str, Capture]) -> Alignment | None:
    """Make the alignment from each layer's capture; None without layers."""
    if not captures:
        return None
    layers = list(captures.values())
    J, energy = math.fsum(layer.J for layer in layers), math.fsum(layer.energy for layer in layers)
    gradient, total = (math.hypot(*(getattr(one, name) for one in layers)) for name in ("gradient", "gradient_total"))
    by_layer: dict[str, list[Any]] = {name: [getattr(layer, name) for layer in layers] for name in LAYER_NUMBERS}
    by_layer["last"] = [layer.values[-1] for layer in layers]
    leading = [layer.values[:NUM_LEADING] for layer in layers]
    medians: dict[str, Any] = {
        name: finite_or_none(median(by_layer[name]))
        for name in ("last", "effective_rank", "participation", "input_spread", "error_spread")
    }
    return Alignment(
        damping=METRIC.damping_by_side[0],
        J=J,
        J_share=J / energy if energy else 0.0,
        gradient=gradient,
        gradient_share=gradient / total if total else 0.0,
        leading=tuple(median(values) for values in zip(*leading, strict=False)),
        **medians,
        layers=LayerAlignment(
            name=tuple(captures),
            leading=tuple(map(_rounded, leading)),
            **{name: _rounded(values) for name, values in by_layer.items()},
        ),
    )


def _rounded(values: Iterable[float]) -> tuple[Any, ...]:
    """The values with fewer digits; None in place of a value that is not finite."""
    found = (value if isinstance(value, int) else float(f"{value:.{DIGITS}g}") for value in values)
    return tuple(map(finite_or_none, found))


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are not None: a record leaves the others out."""
    return {name: part for name, part in parts.items() if part is not None}


def _accuracies(before: Score, after: Score) -> dict[str, Any]:
    """The accuracies by key of the record; empty if the task has none."""
    if after.task is None:
        return {}
    details = {name: value for name, value in vars(after.task).items() if name != "predictions"}
    details["held_out_loss"] = finite_or_none(after.task.held_out_loss)
    details["correct"] = "".join("01"[prediction.correct] for prediction in after.task.predictions)
    return {
        "accuracy_before": before.task.accuracy if before.task else after.task.chance,
        "accuracy": after.task.accuracy,
        "score": AccuracyDetails(**details),
    }


def _row_losses(score: Score) -> RecordedLosses | None:
    """The losses by row; None if the rows' ids are not a split's name and a number."""
    found = score.row_losses
    ids = [row.rpartition("-") for row in found.ids] if found else []
    if found is None or len({split for split, *_ in ids}) > 1 or not all(number.isdecimal() for *_, number in ids):
        return None
    nats = tuple(float(f"{nats:.{DIGITS}g}") for nats in found.nats)
    return RecordedLosses(numbers=tuple(int(number) for *_, number in ids), nats=nats, tokens=found.tokens)


def _selection(config: RunConfig, report: TrainingReport) -> SelectedCheckpoint | None:
    every = config.scoring.select_checkpoint
    if every == "none":
        return None
    return report.selected or SelectedCheckpoint(every=every, rows=0, kept_step=report.num_steps)


def _calibration_summary(calibration: Calibration | None) -> CalibrationSummary | None:
    if calibration is None:
        return None
    layers = list(calibration.layers.values())
    spreads: dict[str, float | None] = {}
    for name in ("input_spread", "error_spread"):
        known = [value for layer in layers if (value := getattr(layer, name)) is not None]
        spreads[name] = finite_or_none(median(known)) if known else None
    return CalibrationSummary(
        collect_s=calibration.collect_s,
        build_s=calibration.build_s,
        num_layers=len(layers),
        num_tokens=layers[0].num_tokens,
        smallest_effective_rank=min(layer.effective_rank for layer in layers),
        median_spread=spreads,
    )
