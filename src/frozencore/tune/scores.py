"""Score a run's model: at its end, and during training, if validation rows choose the step to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from frozencore.progress import Progress, as_stage, with_note
from frozencore.tune.config_parts import ScoringConfig
from frozencore.tune.load import Inputs
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.scoring.exact_match import complete
from frozencore.tune.scoring.forward import Prediction
from frozencore.tune.scoring.score import Score, held_out_loss, score_rows
from frozencore.tune.training.callbacks import Selection

SAMPLE_TOKENS = 64


def score_run(model: nn.Module, inputs: Inputs, config: ScoringConfig, progress: Progress) -> Score:
    """Score a model on the rows that give the run's score, with samples of completions and the loss on other texts."""
    rows, encoder = inputs.rows.scored, inputs.encoder
    score = score_rows(model, encoder, rows, progress=progress)
    has_answers = rows.scoring in ("choice", "exact_match")  # the predictions have them already
    samples, _ = complete(
        model, encoder, () if has_answers else sample_rows(rows.tokens, config.samples),
        max_new_tokens=config.max_new_tokens or SAMPLE_TOKENS, progress=with_note(progress, "samples"),
    )  # fmt: skip
    others = {
        task: held_out_loss(model, texts, pad_id=encoder.pad_id, progress=with_note(progress, f"loss on {task}"))
        for task, texts in inputs.rows.others.items()
    }
    return replace(score, samples=tuple(samples), others=others)


def sample_rows(rows: Sequence[TokenRow], count: int) -> list[TokenRow]:
    """The first rows with different prompts; rows of equal prompts follow if there are no others."""
    by_prompt = {tuple(row.input_ids[: row.answer_start]): row for row in reversed(rows)}
    first = {id(row) for row in by_prompt.values()}
    return sorted(rows, key=lambda row: id(row) not in first)[:count]


def samples_of(inputs: Inputs, before: Sequence[Prediction], after: Sequence[Prediction]) -> list[dict[str, str]]:
    """Prompts as the model reads them, the expected answers, and the model's answers; JSON values by name.

    ``turn`` is the last question of a conversation.
    """
    tokenizer, samples = inputs.encoder.tokenizer, []
    rows = sample_rows(inputs.rows.held_out, len(after))
    for row, was, now in zip(rows, before, after, strict=True):
        prompt = row.input_ids[: row.prompt_end]
        answers = {"wanted": now.gold, "before": was.text, "after": now.text}
        sample = {"id": row.id, "prompt": tokenizer.decode(prompt) + row.overlap, **answers}
        ends = [i for i, token in enumerate(prompt) if token in inputs.encoder.end_ids]
        if inputs.encoder.is_chat and ends:
            start = ends[-2] + 1 if len(ends) > 1 else 0
            sample["turn"] = tokenizer.decode(prompt[start : ends[-1]], skip_special_tokens=True).strip()
        samples.append(sample)
    return samples


def selection_of(config: ScoringConfig, inputs: Inputs, progress: Progress) -> Selection | None:
    """The choice of a step by the run's validation rows; None if no step is chosen or there are no rows."""
    rows, every = inputs.rows.validation, config.choose_every
    if every is None or rows is None:
        return None

    def score(model: nn.Module) -> tuple[float, float | None]:
        scored = score_rows(
            model, inputs.encoder, rows, with_accuracy=config.select_by == "accuracy",
            progress=as_stage(progress, "validate"),
        )  # fmt: skip
        return scored.held_out_loss, scored.task.accuracy if scored.task else None

    return Selection(every, score, config.patience, num_rows=len(rows.tokens))
