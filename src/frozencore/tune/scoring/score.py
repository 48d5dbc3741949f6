"""Score a model on the rows of a task, on the user's own rows, or only by held-out loss."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from frozencore.errors import ConfigError, DataError, ModelError
from frozencore.text import Progress, with_note
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import PaddingCollator, score_in_groups
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.exact_match import SHORT, complete, predict_numbers
from frozencore.tune.scoring.forward import NOT_FINITE, Prediction, completion_logprobs, scoring_mode, vocabulary_of
from frozencore.tune.tasks import Task


@dataclass(frozen=True)
class RowLosses:
    """The held-out loss row by row: the row's id, the summed nats of its completion, and the number of its tokens."""

    ids: tuple[str, ...]
    nats: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Nats per token over all rows."""
        return math.fsum(self.nats) / sum(self.tokens)


@dataclass(frozen=True)
class TaskScore:
    """A task's score over its evaluation rows.

    Attributes:
        held_out_loss: Nats per completion token, including the end token.
        time_s: Wall time of scoring, including the held-out loss.
        chance: Expected accuracy of a uniform guess; ``None`` for generated answers.
        majority_class: Accuracy of always choosing the most frequent position; ``None`` for generated answers.
        num_ties: Choice tasks: examples in which several choices share the best log-likelihood (the first counts).
        num_duplicate_choices: Choice tasks: examples with two equal choices.
        num_cut: Prompts whose beginning was cut because of the length limit.
        num_truncated: Generated tasks: answers that reached the length limit before the end token.
        num_unanswered: Generated tasks: texts without a marker followed by a number.
        row_losses: The held-out loss by row; None if only its mean is known.
        accuracy: Share of correct predictions, from 0 to 1.
        standard_error: Standard error of that share over the rows: ``sqrt(p (1 - p) / (n - 1))``.
    """

    task: str
    held_out_loss: float
    predictions: tuple[Prediction, ...]
    time_s: float
    chance: float | None = None
    majority_class: float | None = None
    num_ties: int = 0
    num_duplicate_choices: int = 0
    num_cut: int = 0
    num_truncated: int = 0
    num_unanswered: int = 0
    row_losses: RowLosses | None = None
    num_examples: int = field(init=False)
    accuracy: float = field(init=False)
    standard_error: float = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.predictions)
        share = sum(prediction.correct for prediction in self.predictions) / count
        error = math.sqrt(share * (1 - share) / max(1, count - 1))  # 0 for a single example
        vars(self).update(num_examples=count, accuracy=share, standard_error=error)


def score_task(
    model: nn.Module,
    encoder: PromptEncoder,
    task: Task,
    examples: Sequence[Example],
    *,
    length_normalised: bool = False,
    progress: Progress | None = None,
) -> TaskScore:
    """Score a model on examples of a task, by choice or by generated number. The model is not changed.

    Raises:
        DataError: There are no examples, or one is invalid or too long.
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
        chance = sum(1 / len(example.choices) for example in examples) / len(examples)
        positions = Counter(example.choices.index(example.completion) for example in examples)
        majority = max(positions.values()) / len(examples)
        num_ties = sum(p.logprobs.count(max(p.logprobs)) > 1 for p in predictions)
    else:
        predictions, num_truncated = predict_numbers(
            model, encoder, examples, max_new_tokens=task.max_new_tokens, progress=progress
        )
        num_unanswered = sum(p.prediction is None for p in predictions)
    texts = [encoder.render(example) for example in examples]
    losses = losses_of_rows(
        model, encoder.training_rows(texts), pad_id=encoder.pad_id, progress=progress and with_note(progress, "loss")
    )
    return TaskScore(
        task=task.name,
        held_out_loss=losses.mean,
        predictions=tuple(predictions),
        time_s=time.perf_counter() - start,
        chance=chance,
        majority_class=majority,
        num_ties=num_ties,
        num_duplicate_choices=sum(len(set(example.choices)) < len(example.choices) for example in examples),
        num_cut=encoder.count_too_long(texts),
        num_truncated=num_truncated,
        num_unanswered=num_unanswered,
        row_losses=losses,
    )


def score_completions(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: Sequence[TokenRow],
    *,
    held_out_loss: float,
    progress: Progress | None = None,
) -> TaskScore:
    """Score the share of short completions that are generated exactly.

    The majority class is the most frequent completion; there is none if all completions differ.
    """
    started = time.perf_counter()
    predictions, num_truncated = complete(model, encoder, rows, max_new_tokens=SHORT + 1, progress=progress)
    most = max(Counter(prediction.gold for prediction in predictions).values())
    return TaskScore(
        task="own rows",
        held_out_loss=held_out_loss,
        predictions=tuple(predictions),
        time_s=time.perf_counter() - started,
        majority_class=most / len(rows) if most > 1 else None,
        num_truncated=num_truncated,
    )


def held_out_loss(
    model: nn.Module, rows: Sequence[TokenRow], *, pad_id: int, progress: Progress | None = None
) -> float:
    """The mean negative log-probability over all completion tokens; errors as in :func:`losses_of_rows`."""
    return losses_of_rows(model, rows, pad_id=pad_id, progress=progress).mean


def losses_of_rows(
    model: nn.Module, rows: Sequence[TokenRow], *, pad_id: int, progress: Progress | None = None
) -> RowLosses:
    """The negative log-probability of each row's completion tokens, including the end token, in the rows' order.

    Raises:
        DataError: No row has a token to predict.
        ModelError: The loss is not finite.
    """
    device, collate, vocabulary = next(model.parameters()).device, PaddingCollator(pad_id), vocabulary_of(model)
    sizes = [(len(row.input_ids), (len(row.input_ids) - row.num_context) * vocabulary) for row in rows]
    losses: dict[int, tuple[float, int]] = {}

    def score(group: list[int]) -> None:
        batch = {name: tensor.to(device) for name, tensor in collate([rows[i] for i in group]).items()}
        logprobs, counted = completion_logprobs(model, batch)
        sums, counts = -logprobs.cpu().double().sum(-1), counted.sum(-1)
        losses.update(zip(group, zip(sums.tolist(), counts.tolist(), strict=True), strict=True))

    with scoring_mode(model):
        score_in_groups(score, sizes, device, progress=progress)
    nats, tokens = zip(*(losses[i] for i in range(len(rows))), strict=True) if rows else ((), ())
    if sum(tokens) == 0:
        raise DataError("A held-out loss needs rows with at least one completion token after another token.")
    if not all(map(math.isfinite, nats)):
        raise ModelError(f"The model's log-probabilities on held-out rows {NOT_FINITE}")
    return RowLosses(tuple(row.id for row in rows), nats, tokens)
