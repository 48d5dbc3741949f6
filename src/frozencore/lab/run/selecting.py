"""What rows say of a run's model: at its end, and while it trains, where validation rows choose the step to keep."""

from __future__ import annotations

from torch import nn

from frozencore.lab.run.bench import Bench, Score
from frozencore.lab.run.config import RunConfig, SelectionMetric
from frozencore.lab.run.record_parts import SelectedCheckpoint, StepScored
from frozencore.lab.run.rows import ScoredRows
from frozencore.lab.scoring.heldout import held_out_loss
from frozencore.lab.scoring.task_score import score_task
from frozencore.lab.training.recipe import TrainingReport
from frozencore.lab.training.selection import Selection
from frozencore.progress import Progress


def score_rows(
    model: nn.Module, bench: Bench, rows: ScoredRows, progress: Progress, *, by: SelectionMetric = "accuracy"
) -> Score:
    """Score a model on rows of the bench's task or file.

    Args:
        by: ``held_out_loss`` leaves the accuracy out.
    """
    task = bench.rows.task
    if task is None or task.scoring == "text" or by == "held_out_loss":
        return Score(held_out_loss(model, rows.tokens, pad_id=bench.encoder.pad_id, progress=progress))
    score = score_task(model, bench.encoder, task, rows.examples, progress=progress)
    return Score(score.held_out_loss, task=score)


def selection_of(config: RunConfig, bench: Bench, progress: Progress) -> Selection | None:
    """How the run's validation rows choose among the steps; None where they do not, or where there are none."""
    rows = bench.rows.validation
    if config.select_checkpoint == "none" or rows is None:
        return None

    def score(model: nn.Module, go_on: Progress) -> tuple[float, float | None]:
        def told(stage: str, done: int, total: int | None, note: str = "") -> None:
            go_on(stage, done, total, note)
            progress("validate", done, total, note)

        found = score_rows(model, bench, rows, told, by=config.select_by)
        return found.held_out_loss, found.task.accuracy if found.task else None

    identity = f"{bench.rows.fingerprints()['validation']} by {config.select_by}"
    return Selection(config.select_checkpoint, score, identity, config.patience)


def selected_checkpoint(config: RunConfig, bench: Bench, report: TrainingReport) -> SelectedCheckpoint | None:
    """What the record says of the choice; None where none was asked for."""
    if config.select_checkpoint == "none":
        return None
    rows, found = bench.rows.validation, report.selected
    if rows is None or found is None:
        return SelectedCheckpoint(every=config.select_checkpoint, rows=0, kept_step=report.num_steps)
    return SelectedCheckpoint(
        every=config.select_checkpoint,
        by="held_out_loss" if found.scores[0].accuracy is None else "accuracy",
        rows=len(rows.tokens),
        kept_step=found.step,
        scores=tuple(StepScored(**vars(score)) for score in found.scores),
        time_s=found.time_s,
        **({"stopped_early": True} if found.stopped else {}),
    )
