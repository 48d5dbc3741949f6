"""Score a model on rows: by held-out loss, and by the share of right answers if the rows have answers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from frozencore.errors import DataError, ModelError
from frozencore.progress import Progress, no_progress, with_note
from frozencore.tune.record import RowLosses, TaskScore
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.sources import Scoring
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.exact_match import SHORT, complete, predict_numbers
from frozencore.tune.scoring.forward import NOT_FINITE, Prediction, nats_of_rows


@dataclass(frozen=True)
class ScoredRows:
    """Rows to score a model on, and how they are scored.

    Attributes:
        name: The source of the rows.
        max_new_tokens: Length limit of a generated answer.
    """

    name: str
    scoring: Scoring
    tokens: list[TokenRow]
    max_new_tokens: int = SHORT + 1


@dataclass(frozen=True)
class Score:
    """The scores of a model on rows.

    Attributes:
        held_out_loss: Nats per completion token.
        task, predictions: The accuracy and the answers, if the rows have any.
        samples: Sample completions, if requested.
        others: The loss on the texts of other tasks by name.
    """

    held_out_loss: float
    task: TaskScore | None = None
    predictions: tuple[Prediction, ...] = ()
    samples: tuple[Prediction, ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    row_losses: RowLosses | None = None


def score_rows(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: ScoredRows,
    *,
    with_accuracy: bool = True,
    length_normalised: bool = False,
    progress: Progress = no_progress,
) -> Score:
    """Score a model on rows. The model is not changed.

    Args:
        with_accuracy: Count right answers too, if the rows have answers.
        length_normalised: Compare choices by log-likelihood per character.

    Raises:
        DataError: A row has no number to compare with.
        ModelError: The model's outputs are not finite.
    """
    start, answered = time.perf_counter(), None
    if with_accuracy and rows.scoring != "text":
        answered = _answers(model, encoder, rows, length_normalised=length_normalised, progress=progress)
    losses = losses_of_rows(model, rows.tokens, pad_id=encoder.pad_id, progress=with_note(progress, "loss"))
    if answered is None:
        return Score(losses.mean, row_losses=losses)
    predictions, counts = answered
    correct, size = [one.correct for one in predictions], len(predictions)
    share = sum(correct) / size
    task = TaskScore(
        task=rows.name,
        held_out_loss=losses.mean,
        time_s=time.perf_counter() - start,
        num_examples=size,
        accuracy=share,
        standard_error=math.sqrt(share * (1 - share) / max(1, size - 1)),  # 0 for a single example
        correct="".join("01"[one] for one in correct),
        **counts,
    )
    return Score(losses.mean, task, tuple(predictions), row_losses=losses)


def _answers(
    model: nn.Module, encoder: PromptEncoder, rows: ScoredRows, *, length_normalised: bool, progress: Progress
) -> tuple[list[Prediction], dict[str, Any]]:
    """The predictions for rows with answers, and what is counted of them for :class:`TaskScore`."""
    tokens, limit, size = rows.tokens, rows.max_new_tokens, len(rows.tokens)
    num_cut = sum(row.num_cut > 0 for row in tokens)
    if rows.scoring == "completion":
        noted = with_note(progress, "completions")
        predictions, num_truncated = complete(model, encoder, tokens, max_new_tokens=limit, progress=noted)
        most = max(Counter(prediction.gold for prediction in predictions).values())
        majority = most / size if most > 1 else None
        return predictions, {"num_cut": num_cut, "num_truncated": num_truncated, "majority_class": majority}
    if rows.scoring == "exact_match":
        predictions, num_truncated = predict_numbers(model, encoder, tokens, max_new_tokens=limit, progress=progress)
        num_unanswered = sum(p.prediction is None for p in predictions)
        return predictions, {"num_cut": num_cut, "num_truncated": num_truncated, "num_unanswered": num_unanswered}
    choices = [row.choices for row in tokens if row.choices is not None]
    predictions = predict_choices(
        model, choices, pad_id=encoder.pad_id, length_normalised=length_normalised, progress=progress
    )
    return predictions, {
        "num_cut": num_cut,
        "chance": sum(1 / len(one.choice_ids) for one in choices) / size,
        "majority_class": max(Counter(one.right for one in choices).values()) / size,
        "num_ties": sum(p.logprobs.count(max(p.logprobs)) > 1 for p in predictions),
        "num_duplicate_choices": sum(len(set(one.labels)) < len(one.labels) for one in choices),
    }


def held_out_loss(
    model: nn.Module, rows: Sequence[TokenRow], *, pad_id: int, progress: Progress = no_progress
) -> float:
    """The mean negative log-probability over all completion tokens; errors as in :func:`losses_of_rows`."""
    return losses_of_rows(model, rows, pad_id=pad_id, progress=progress).mean


def losses_of_rows(
    model: nn.Module, rows: Sequence[TokenRow], *, pad_id: int, progress: Progress = no_progress
) -> RowLosses:
    """The negative log-probability of each row's completion tokens, including the end token, in the rows' order.

    Raises:
        DataError: No row has a token to predict.
        ModelError: The loss is not finite.
    """
    nats = nats_of_rows(model, rows, pad_id=pad_id, progress=progress)
    tokens = [row.num_targets for row in rows]
    if sum(tokens) == 0:
        raise DataError("A held-out loss needs rows with at least one completion token after another token.")
    if not all(map(math.isfinite, nats)):
        raise ModelError(f"The model's log-probabilities on held-out rows {NOT_FINITE}")
    splits, _, numbers = zip(*(row.id.rpartition("-") for row in rows), strict=True)
    are_known = len(set(splits)) == 1 and all(number.isdecimal() for number in numbers)
    return RowLosses(numbers=tuple(map(int, numbers)) if are_known else (), nats=tuple(nats), tokens=tuple(tokens))
