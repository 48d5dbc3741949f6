"""Score a run's model: at its end, and during training, if validation rows choose the step to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from frozencore.text import Progress, as_stage, with_note
from frozencore.tune.config import ScoringConfig, SelectionMetric
from frozencore.tune.load import Inputs
from frozencore.tune.read_rows import ScoredRows
from frozencore.tune.scoring.exact_match import complete
from frozencore.tune.scoring.forward import Prediction
from frozencore.tune.scoring.score import (
    RowLosses,
    TaskScore,
    held_out_loss,
    losses_of_rows,
    score_completions,
    score_task,
)
from frozencore.tune.training.callbacks import Selection

SAMPLE_TOKENS = 64


@dataclass(frozen=True)
class Score:
    """The scores of a model on the evaluation rows.

    Attributes:
        held_out_loss: Nats per completion token.
        task: The task's accuracy, if it has one.
        samples: Sample completions, if requested.
        others: The loss on the texts of other tasks by name.
    """

    held_out_loss: float
    task: TaskScore | None = None
    samples: tuple[Prediction, ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    row_losses: RowLosses | None = None


def score_rows(
    model: nn.Module,
    inputs: Inputs,
    rows: ScoredRows,
    progress: Progress,
    *,
    by: SelectionMetric = "accuracy",
    samples: int = 0,
    max_new_tokens: int | None = None,
) -> Score:
    """Score a model on rows of the run's task or file.

    Args:
        by: ``held_out_loss`` skips the accuracy.
        samples: The number of own rows to complete, with at most ``max_new_tokens``.
    """
    task = inputs.rows.task
    if task is None:
        losses = losses_of_rows(model, rows.tokens, pad_id=inputs.encoder.pad_id, progress=with_note(progress, "loss"))
        matched = None
        if inputs.rows.exact_match and by == "accuracy":
            told = with_note(progress, "completions")
            matched = score_completions(model, inputs.encoder, rows.tokens, held_out_loss=losses.mean, progress=told)
        said, _ = complete(
            model, inputs.encoder, rows.tokens[:samples], max_new_tokens=max_new_tokens or SAMPLE_TOKENS,
            progress=with_note(progress, "samples"),
        )  # fmt: skip
        return Score(losses.mean, matched, tuple(said), row_losses=losses)
    if task.scoring == "text" or by == "held_out_loss":
        losses = losses_of_rows(model, rows.tokens, pad_id=inputs.encoder.pad_id, progress=progress)
        return Score(losses.mean, row_losses=losses)
    score = score_task(model, inputs.encoder, task, rows.examples, progress=progress)
    return Score(score.held_out_loss, task=score, row_losses=score.row_losses)


def score_run(model: nn.Module, inputs: Inputs, config: ScoringConfig, progress: Progress) -> Score:
    """Score a model on the rows that give the run's score."""
    score = score_rows(
        model, inputs, inputs.rows.scored, progress, samples=config.samples, max_new_tokens=config.max_new_tokens
    )
    others = {
        task: held_out_loss(model, rows, pad_id=inputs.encoder.pad_id, progress=with_note(progress, f"loss on {task}"))
        for task, rows in inputs.rows.others.items()
    }
    return replace(score, others=others)


def samples_of(inputs: Inputs, before: Sequence[Prediction], after: Sequence[Prediction]) -> list[dict[str, str]]:
    """Prompts as the model reads them, the expected answers, and the model's answers; JSON values by name."""
    decode, found = inputs.encoder.tokenizer.decode, []
    for row, was, now in zip(inputs.rows.held_out, before, after, strict=False):
        prompt = decode(row.input_ids[: row.answer_start or max(1, len(row.input_ids) // 2)]) + row.joined
        found.append({"id": row.id, "prompt": prompt, "wanted": now.gold, "before": was.text, "after": now.text})
    return found


def selection_of(config: ScoringConfig, inputs: Inputs, progress: Progress) -> Selection | None:
    """The choice of a step by the run's validation rows; None if no step is chosen or there are no rows."""
    rows = inputs.rows.validation
    if config.select_checkpoint == "none" or rows is None:
        return None

    def score(model: nn.Module) -> tuple[float, float | None]:
        found = score_rows(model, inputs, rows, as_stage(progress, "validate"), by=config.select_by)
        return found.held_out_loss, found.task.accuracy if found.task else None

    identity = f"{inputs.rows.fingerprints['validation']} by {config.select_by}"
    return Selection(config.select_checkpoint, score, identity, config.patience)
