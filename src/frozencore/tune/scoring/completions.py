"""What a model completes prompts of one's own rows with, greedily, and whether it is word for word the completion."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from torch import nn

from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row_forms import TokenRow
from frozencore.tune.scoring.exact_match import generate_greedily
from frozencore.tune.scoring.score import Prediction, TaskScore, accuracy_with_error
from frozencore.words import Progress

SHORT = 16  # tokens of a completion, its end token left out


def are_short(rows: Sequence[TokenRow]) -> bool:
    """Whether every completion is short enough to be compared word for word."""
    return all(len(row.input_ids) - row.num_context - 1 <= SHORT for row in rows)


def complete(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: Sequence[TokenRow],
    *,
    max_new_tokens: int,
    progress: Progress | None = None,
) -> tuple[list[Prediction], int]:
    """A prediction of each row, right if it reads as the completion but for white space around it, and how many met the
    length limit.

    Rows without a prompt are continued from their first half.
    """
    starts = [row.num_context or max(1, len(row.input_ids) // 2) for row in rows]
    found = generate_greedily(
        model,
        [row.input_ids[:start] for row, start in zip(rows, starts, strict=True)],
        encoder=encoder,
        max_new_tokens=max_new_tokens,
        progress=progress,
    )
    predictions = []
    for row, start, one in zip(rows, starts, found, strict=True):
        gold = encoder.tokenizer.decode(row.input_ids[start:], skip_special_tokens=True).strip()
        said = one.text.strip()
        predictions.append(Prediction(row.id, said, gold, said == gold and not one.truncated, text=one.text))
    return predictions, sum(one.truncated for one in found)


def score_completions(
    model: nn.Module,
    encoder: PromptEncoder,
    rows: Sequence[TokenRow],
    *,
    held_out_loss: float,
    progress: Progress | None = None,
) -> TaskScore:
    """The share of short completions that are generated word for word; the majority is the most frequent of them, where
    they repeat."""
    started = time.perf_counter()
    predictions, num_truncated = complete(model, encoder, rows, max_new_tokens=SHORT + 1, progress=progress)
    accuracy, standard_error = accuracy_with_error(predictions)
    most = max(Counter(prediction.gold for prediction in predictions).values())
    return TaskScore(
        task="own rows",
        accuracy=accuracy,
        standard_error=standard_error,
        num_examples=len(rows),
        num_ties=0,
        num_duplicate_choices=0,
        num_cut=0,
        num_truncated=num_truncated,
        num_unanswered=0,
        chance=None,
        majority_class=most / len(rows) if most > 1 else None,
        held_out_loss=held_out_loss,
        predictions=tuple(predictions),
        time_s=time.perf_counter() - started,
    )
