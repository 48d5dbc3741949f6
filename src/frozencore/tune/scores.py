"""Score a run's model: at its end, and during training, if validation rows choose the step to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from frozencore.text import Progress, as_stage, with_note
from frozencore.tune.config import ScoringConfig, SelectionMetric
from frozencore.tune.load import Inputs
from frozencore.tune.read_rows import ScoredRows
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
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
from frozencore.tune.tasks import Task
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
    encoder: PromptEncoder,
    task: Task | None,
    rows: ScoredRows,
    progress: Progress,
    *,
    exact_match: bool = False,
    length_normalised: bool = False,
    by: SelectionMetric = "accuracy",
    samples: int = 0,
    max_new_tokens: int | None = None,
) -> Score:
    """Score a model on rows of a task, or of the user's own file if ``task`` is None.

    Args:
        exact_match: Generate and compare the completions of own rows.
        length_normalised: Compare choices by log-likelihood per character.
        by: ``held_out_loss`` skips the accuracy.
        samples: The number of own rows to complete, with at most ``max_new_tokens``.
    """
    if task is not None and task.scoring != "text" and by == "accuracy":
        score = score_task(model, encoder, task, rows.examples, length_normalised=length_normalised, progress=progress)
        return Score(score.held_out_loss, task=score, row_losses=score.row_losses)
    noted = progress if task else with_note(progress, "loss")
    losses, matched = losses_of_rows(model, rows.tokens, pad_id=encoder.pad_id, progress=noted), None
    if exact_match and by == "accuracy":
        told = with_note(progress, "completions")
        matched = score_completions(model, encoder, rows.tokens, held_out_loss=losses.mean, progress=told)
    shown = () if task else sample_rows(rows.tokens, samples)
    said, _ = complete(
        model, encoder, shown, max_new_tokens=max_new_tokens or SAMPLE_TOKENS, progress=with_note(progress, "samples")
    )
    return Score(losses.mean, matched, tuple(said), row_losses=losses)


def score_run(model: nn.Module, inputs: Inputs, config: ScoringConfig, progress: Progress) -> Score:
    """Score a model on the rows that give the run's score."""
    score = score_rows(
        model, inputs.encoder, inputs.rows.task, inputs.rows.scored, progress, exact_match=inputs.rows.exact_match,
        samples=config.samples, max_new_tokens=config.max_new_tokens,
    )  # fmt: skip
    others = {
        task: held_out_loss(model, rows, pad_id=inputs.encoder.pad_id, progress=with_note(progress, f"loss on {task}"))
        for task, rows in inputs.rows.others.items()
    }
    return replace(score, others=others)


def sample_rows(rows: Sequence[TokenRow], count: int) -> list[TokenRow]:
    """The first rows with different prompts; rows of equal prompts follow if there are no others."""
    by_prompt = {tuple(row.input_ids[: row.answer_start]): row for row in reversed(rows)}
    first = {id(row) for row in by_prompt.values()}
    return sorted(rows, key=lambda row: id(row) not in first)[:count]


def samples_of(inputs: Inputs, before: Sequence[Prediction], after: Sequence[Prediction]) -> list[dict[str, str]]:
    """Prompts as the model reads them, the expected answers, and the model's answers; JSON values by name.

    ``turn`` is the last question of a conversation.
    """
    tokenizer, found = inputs.encoder.tokenizer, []
    rows = sample_rows(inputs.rows.held_out, len(after))
    for row, was, now in zip(rows, before, after, strict=True):
        prompt = row.input_ids[: row.answer_start or max(1, len(row.input_ids) // 2)]
        answers = {"wanted": now.gold, "before": was.text, "after": now.text}
        sample = {"id": row.id, "prompt": tokenizer.decode(prompt) + row.overlap, **answers}
        ends = [i for i, token in enumerate(prompt) if token in inputs.encoder.end_ids]
        if inputs.encoder.is_chat and ends:
            start = ends[-2] + 1 if len(ends) > 1 else 0
            sample["turn"] = tokenizer.decode(prompt[start : ends[-1]], skip_special_tokens=True).strip()
        found.append(sample)
    return found


def selection_of(config: ScoringConfig, inputs: Inputs, progress: Progress) -> Selection | None:
    """The choice of a step by the run's validation rows; None if no step is chosen or there are no rows."""
    rows = inputs.rows.validation
    if config.select_checkpoint == "none" or rows is None:
        return None

    def score(model: nn.Module) -> tuple[float, float | None]:
        found = score_rows(
            model, inputs.encoder, inputs.rows.task, rows, as_stage(progress, "validate"), by=config.select_by,
            exact_match=inputs.rows.exact_match,
        )  # fmt: skip
        return found.held_out_loss, found.task.accuracy if found.task else None

    identity = f"{inputs.rows.fingerprints['validation']} by {config.select_by}"
    return Selection(config.select_checkpoint, score, identity, config.patience, num_rows=len(rows.tokens))
