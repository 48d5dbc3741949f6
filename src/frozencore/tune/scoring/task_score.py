"""Scoring a whole task, by choice or by generated number."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import nn

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.exact_match import predict_numbers
from frozencore.tune.scoring.heldout import held_out_loss
from frozencore.tune.scoring.score import TaskScore, accuracy_with_error, chance_and_majority
from frozencore.tune.tasks.task import Example, Task
from frozencore.words import Progress


def score_task(
    model: nn.Module,
    encoder: PromptEncoder,
    task: Task,
    examples: Sequence[Example],
    *,
    length_normalised: bool = False,
    progress: Progress | None = None,
) -> TaskScore:
    """Score a model on examples of a task. The model is left as it was.

    Raises:
        DataError: There are no examples, or one is wrong or too long.
        ModelError: The model's outputs are not finite.
    """
    if not examples:
        raise DataError(f"Task {task.name!r} has no rows to score. Give at least one.")
    if task.scoring == "text":
        raise ConfigError(
            f"Task {task.name!r} is plain text and has no answers to score; `tune` gives its held-out loss."
        )
    start = time.perf_counter()
    num_truncated = num_ties = num_unanswered = 0
    chance = majority = None
    if task.scoring == "choice":
        predictions = predict_choices(model, encoder, examples, length_normalised=length_normalised, progress=progress)
        chance, majority = chance_and_majority(examples)
        num_ties = sum(p.logprobs.count(max(p.logprobs)) > 1 for p in predictions)
    else:
        predictions, num_truncated = predict_numbers(
            model, encoder, examples, max_new_tokens=task.max_new_tokens, progress=progress
        )
        num_unanswered = sum(p.prediction is None for p in predictions)
    texts = [encoder.render(example) for example in examples]
    loss = held_out_loss(model, encoder.training_rows(texts), pad_id=encoder.pad_id)
    accuracy, standard_error = accuracy_with_error(predictions)
    return TaskScore(
        task=task.name,
        accuracy=accuracy,
        standard_error=standard_error,
        num_examples=len(examples),
        num_ties=num_ties,
        num_duplicate_choices=sum(len(set(example.choices)) < len(example.choices) for example in examples),
        num_cut=encoder.count_too_long(texts),
        num_truncated=num_truncated,
        num_unanswered=num_unanswered,
        chance=chance,
        majority_class=majority,
        held_out_loss=loss,
        predictions=tuple(predictions),
        time_s=time.perf_counter() - start,
    )
