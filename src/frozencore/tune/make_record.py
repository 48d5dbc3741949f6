"""Make the record of a finished run, and what its model card tells."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frozencore.adapter.basis import read_header
from frozencore.adapter.core import Core
from frozencore.distributed import num_ranks
from frozencore.files.names import ADAPTER
from frozencore.tune.accuracy import accuracy_in_words
from frozencore.tune.adapt import Adapted
from frozencore.tune.calibration_record import CalibrationSummary
from frozencore.tune.config import RunConfig
from frozencore.tune.cost import PeakMemory
from frozencore.tune.load import Inputs
from frozencore.tune.provenance import Provenance
from frozencore.tune.record import (
    RECORD_FORMAT,
    Hashes,
    OtherTask,
    RecordedConfig,
    Resolved,
    Resources,
    SelectedCheckpoint,
    TenantGroup,
    TunedRecord,
)
from frozencore.tune.rows.row_sources import named
from frozencore.tune.rows.sources import find_source, is_named
from frozencore.tune.run_rows import RunRows
from frozencore.tune.scoring.score import Score
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport


def make_record(
    config: RunConfig,
    inputs: Inputs,
    adapted: Adapted,
    recipe: Recipe,
    report: TrainingReport,
    scores: tuple[Score, Score],
    *,
    core: Core | None,
    hashes: Mapping[str, str],
    folder: Path,
    memory: PeakMemory,
    started: float,
    warnings: Sequence[str],
    company: TenantGroup | None = None,
) -> TunedRecord:
    """Make the content of ``result.json`` for a run whose adapter is saved.

    Args:
        scores: Before and after training.
        core: The saved core; None for a method without bases.
        hashes: SHA-256 of the base model and of the rows, by name, and the id of the basis.
        started: ``time.perf_counter()`` when the run began.
        warnings: Those of this run beside the calibration's.
        company: The tenants that trained together with this one; None for a run alone.
    """
    (before, after), made, at_once = scores, adapted.made, report.num_trainable
    saved = sum(file.stat().st_size for file in (folder / ADAPTER).glob("*.safetensors"))
    forgetting = {task: OtherTask(loss_before=before.others[task], loss=loss) for task, loss in after.others.items()}
    further: dict[str, Any] = {
        "selection": _selection(config, report),
        "company": company,
        "forgetting": forgetting or None,
        "row_losses": after.row_losses and after.row_losses.recorded,
        "processes": num_ranks() if num_ranks() > 1 else None,
    }
    if before.task is not None and after.task is not None:
        further |= {"accuracy_before": before.task.accuracy, "accuracy": after.task.accuracy, "score": after.task}
    return TunedRecord(
        format=RECORD_FORMAT,
        config=RecordedConfig.of(config),
        task=inputs.rows.task,
        method=config.method.name,
        seed=config.rows.seed,
        rows=inputs.rows.used,
        held_out_loss_before=before.held_out_loss,
        held_out_loss=after.held_out_loss,
        num_trainable=at_once,
        state_held_bytes=report.state_held_bytes,
        saved_bytes=saved,
        model_bytes=adapted.model_bytes,
        calibration_s=made.time_s,
        training_s=report.time_s,
        total_s=time.perf_counter() - started,
        peak_memory_bytes=memory.largest,
        resources=Resources(
            magnitude_parameters=adapted.num_magnitudes,
            saved_bytes_without_bases=saved if core is None else core.num_bytes,
            step_s=report.step_s,
        ),
        training=report.training,
        **_known(further),
        resolved=Resolved(
            targets=adapted.targets,
            recipe=recipe.content(),
            max_length=inputs.encoder.max_length,
            prompt_style="chat" if inputs.encoder.is_chat else "plain",
            dtype=str(inputs.model.dtype).removeprefix("torch."),
            **_known({"system": inputs.rows.system, "started_from": config.method.start_from}),
        ),
        calibration=made.calibration,
        alignment=made.alignment,
        hashes=Hashes(**hashes),
        warnings=(*made.warnings, *warnings),
        provenance=Provenance.here(next(adapted.model.parameters()).device),
    )


def headline(score: Score) -> dict[str, float | str]:
    """The scores that the model card shows."""
    task = score.task
    accuracy = {"accuracy": accuracy_in_words(task.accuracy, task.num_examples)} if task else {}
    return {**accuracy, "held-out nats per token": score.held_out_loss}


def calibrated_on(config: RunConfig, rows: RunRows, calibration: CalibrationSummary | None) -> str | None:
    """Describe the calibration data for the model card; None if no data were read."""
    if config.method.basis is not None:
        return read_header(config.method.basis).calibrated_on
    if calibration is None:
        return None
    given = config.rows
    read = (given.calibration_data,) if given.calibration_data else given.sources
    sources = " and ".join(find_source(one).name if is_named(one) else named(one) for one in read)
    return f"{len(rows.calibration)} rows of {sources}, {calibration.num_tokens:,} tokens"


def _known(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that are not None: a record leaves the others out."""
    return {name: part for name, part in parts.items() if part is not None}


def _selection(config: RunConfig, report: TrainingReport) -> SelectedCheckpoint | None:
    every = config.scoring.choose_every
    if every is None:
        return None
    return report.selected or SelectedCheckpoint(every=every, rows=0, kept_step=report.training.num_steps)
