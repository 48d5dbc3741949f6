"""Make the record and the model card of a finished run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from frozencore.adapter.calibrate import Calibration
from frozencore.adapter.saved.basis import read_header
from frozencore.ranks import num_ranks
from frozencore.tune.config import RunConfig
from frozencore.tune.rows.row_sources import named, sources_of
from frozencore.tune.run.costs import FLOAT32_BYTES, model_bytes, values_at_once
from frozencore.tune.run.prepare import PreparedRun, Score
from frozencore.tune.run.record import RECORD_FORMAT, TunedRecord
from frozencore.tune.run.record_criterion import criterion_of, finite_or_none
from frozencore.tune.run.record_parts import (
    AccuracyDetails,
    CalibrationSummary,
    CompanySize,
    Hashes,
    OtherTask,
    Provenance,
    RecordedConfig,
    Resolved,
    Resources,
    RowLosses,
    TrainedSteps,
    UsedRows,
)
from frozencore.tune.run.row_sets import RunRows
from frozencore.tune.run.run_folder import ADAPTER
from frozencore.tune.run.scores import selected_checkpoint
from frozencore.tune.run.training_port import Outcome


def make_record(outcome: Outcome, score: Score, hashes: Mapping[str, str]) -> TunedRecord:
    """Make the content of ``result.json`` for a run whose adapter is saved.

    Args:
        score: The score of the trained model.
        hashes: SHA-256 of the base model, of the rows and of the bases, by name.
    """
    run, report = outcome.training, outcome.report
    config, prepared = run.config, run.prepared
    recipe = outcome.recipe.content()
    assert prepared.before is not None
    at_once = report.values_at_once or values_at_once(run.model)
    can_be_made_again = config.method.entry.frozen_can_be_made_again
    saved = sum(file.stat().st_size for file in (run.folder / ADAPTER).glob("*.safetensors"))
    return TunedRecord(
        format=RECORD_FORMAT,
        config=RecordedConfig.of(config),
        task=config.rows.task,
        method=config.method.name,
        seed=config.rows.seed,
        rows=_used_rows(config, prepared.rows),
        held_out_loss_before=finite_or_none(prepared.before.held_out_loss),
        held_out_loss=finite_or_none(score.held_out_loss),
        **_accuracies(prepared.before, score),
        values_at_once=at_once,
        state_held_bytes=report.state_held_bytes,
        saved_bytes=saved,
        model_bytes=model_bytes(run.model),
        calibration_s=run.calibration_s,
        training_s=report.time_s,
        total_s=time.perf_counter() - run.started,
        peak_memory_bytes=run.memory.largest,
        resources=Resources(
            magnitude_parameters=sum(p.numel() for name, p in run.model.named_parameters() if "magnitude" in name),
            saved_bytes_without_bases=FLOAT32_BYTES * at_once if can_be_made_again else saved,
            calibration_s=run.calibration_s,
            step_s=report.step_s,
            num_steps=report.num_steps,
            peak_memory_bytes=run.memory.largest,
            peaks=run.memory.peaks if report.side_by_side is None else None,  # its training was shared
        ),
        training=TrainedSteps(num_steps=report.num_steps, final_loss=report.final_loss, losses=report.losses),
        **_if_any(
            selection=selected_checkpoint(config.scoring, prepared, report),
            company=CompanySize(tenants=beside[0], slots=beside[1]) if (beside := report.side_by_side) else None,
            forgetting=_forgetting(prepared.before, score),
            row_losses=_row_losses(score),
            processes=num_ranks() if num_ranks() > 1 else None,
        ),
        resolved=Resolved(targets=run.targets, recipe=recipe, max_length=prepared.encoder.max_length),
        calibration=_calibration_summary(run.calibration),
        criterion=criterion_of(run.captures),
        hashes=Hashes(**hashes),
        warnings=tuple(sorted({str(one.message) for one in run.warned if one.category is UserWarning})),
        provenance=Provenance.here(next(run.model.parameters()).device),
    )


def _if_any(**parts: Any) -> dict[str, Any]:
    """The given parts by key, without those that are None."""
    return {name: part for name, part in parts.items() if part is not None}


def _used_rows(config: RunConfig, rows: RunRows) -> UsedRows:
    further = _if_any(**dict(rows.reading or ()))
    if config.rows.truncate:
        further["cut"] = rows.num_cut
    if config.rows.skip_long:
        further["skipped"] = rows.num_skipped
    return UsedRows(
        trained=len(rows.train),
        scored=len(rows.held_out),
        scored_on=config.scoring.evaluate_on,
        validation_from=rows.validation_from,
        **further,
    )


def headline(score: Score) -> dict[str, float]:
    """The scores that the model card shows."""
    accuracy = {"accuracy": score.task.accuracy} if score.task else {}
    return {**accuracy, "held-out nats per token": score.held_out_loss}


def calibrated_on(config: RunConfig, prepared: PreparedRun, calibration: Calibration | None) -> str | None:
    """Describe the calibration data for the model card; None if no data were read."""
    if config.method.basis is not None:
        said: str | None = read_header(config.method.basis)["calibrated_on"]
        return said
    if calibration is None:
        return None
    sources = " and ".join(named(source) for source in sources_of(config.rows.data)) if config.rows.data else ""
    source = config.rows.calibration_task or config.rows.task or sources or "rows of the user"
    num_tokens = next(iter(calibration.layers.values())).num_tokens
    return f"{len(prepared.rows.calibration)} rows of {source}, {num_tokens:,} tokens"


def _accuracies(before: Score, after: Score) -> dict[str, Any]:
    """The accuracies by key of the record; empty if the task has none."""
    if after.task is None:
        return {}
    at_first = before.task.accuracy if before.task else after.task.chance
    details = {name: value for name, value in vars(after.task).items() if name not in ("predictions", "row_losses")}
    details["held_out_loss"] = finite_or_none(after.task.held_out_loss)
    details["correct"] = "".join("01"[prediction.correct] for prediction in after.task.predictions)
    return {
        "accuracy_before": at_first,
        "accuracy": after.task.accuracy,
        "score": AccuracyDetails(**details),
    }


def _row_losses(score: Score) -> RowLosses | None:
    """The losses by row; None if the rows' ids are not a split's name and a number."""
    found = score.row_losses
    ids = [row.rpartition("-") for row in found.ids] if found else []
    if found is None or len({split for split, *_ in ids}) > 1 or not all(number.isdecimal() for *_, number in ids):
        return None
    return RowLosses(
        numbers=tuple(int(number) for *_, number in ids),
        nats=tuple(float(f"{nats:.6g}") for nats in found.nats),
        tokens=found.tokens,
    )


def _forgetting(before: Score, after: Score) -> dict[str, OtherTask] | None:
    rows = {
        task: OtherTask(loss_before=finite_or_none(before.others[task]), loss=finite_or_none(loss))
        for task, loss in after.others.items()
    }
    return rows or None


def _calibration_summary(calibration: Calibration | None) -> CalibrationSummary | None:
    if calibration is None:
        return None
    layers = list(calibration.layers.values())
    return CalibrationSummary(
        collect_s=calibration.collect_s,
        build_s=calibration.build_s,
        num_layers=len(layers),
        num_tokens=layers[0].num_tokens,
        smallest_effective_rank=min(layer.effective_rank for layer in layers),
        median_spread={
            "input_spread": _median(layer.input_spread for layer in layers),
            "error_spread": _median(layer.error_spread for layer in layers),
        },
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return finite_or_none(median(known)) if known else None
