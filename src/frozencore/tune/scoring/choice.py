"""Choice by log-likelihood: the choice whose tokens have the highest summed log-probability after the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from frozencore.calibration.batches import on_one_side, rope_limit
from frozencore.errors import DataError, ModelError
from frozencore.tune.rows import ChoiceTokens, Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import PaddingCollator, score_in_groups
from frozencore.tune.scoring import Prediction
from frozencore.tune.scoring.forward import NOT_FINITE, completion_logprobs, scoring_mode, vocabulary_of
from frozencore.tune.scoring.shared_prefix import can_share_prefix, shared_prefix_logprobs
from frozencore.words import Progress


def predict_choices(
    model: nn.Module,
    encoder: PromptEncoder,
    examples: Sequence[Example],
    *,
    length_normalised: bool = False,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Predict the likeliest choice of every example, in order; the first of equally likely ones.

    Args:
        length_normalised: Compare log-likelihood per character of the choice (the harness's ``acc_norm``).

    Raises:
        DataError: An example's completion is not among its choices, or its text cannot be encoded.
        ModelError: As in :func:`choice_logprobs`.
    """
    for example in examples:
        if example.completion not in example.choices:
            raise DataError(
                f"Row {example.id}: the answer {example.completion!r} is not among its choices {example.choices}."
            )
    rows = encoder.choice_rows([encoder.render(example) for example in examples])
    logprobs = choice_logprobs(model, rows, pad_id=encoder.pad_id, progress=progress)
    predictions = []
    for example, values in zip(examples, logprobs, strict=True):
        if length_normalised:
            values = [v / len(choice.strip()) for v, choice in zip(values, example.choices, strict=True)]
        choice = example.choices[max(range(len(values)), key=values.__getitem__)]
        predictions.append(
            Prediction(example.id, choice, example.completion, choice == example.completion, tuple(values))
        )
    return predictions


def choice_logprobs(
    model: nn.Module,
    rows: Sequence[ChoiceTokens],
    *,
    pad_id: int,
    tokens_per_batch: int | None = None,
    share_prefix: bool | None = None,
    progress: Progress | None = None,
) -> list[list[float]]:
    """Summed log-probabilities, in nats, of the tokens of every choice, in the rows' order.

    Args:
        tokens_per_batch: Padded tokens in one forward pass, which bound the memory; halved if memory runs out.
            ``None`` depends on the device.
        share_prefix: Compute each prompt once for all its choices. ``None``: if the model allows it.

    Raises:
        ModelError: A log-likelihood is not finite, or one row does not fit in memory.
    """
    share_prefix = can_share_prefix(model) if share_prefix is None else share_prefix
    limit = rope_limit(model)
    if limit is not None and any(len(row.context_ids) + max(map(len, row.choice_ids)) > limit for row in rows):
        share_prefix = False  # one row's choices may lie on both sides
    vocabulary = vocabulary_of(model)
    sizes = [_tokens_and_logits(row, vocabulary, share_prefix) for row in rows]
    device = next(model.parameters()).device
    logprobs: list[list[float]] = [[] for _ in rows]
    of_rows = shared_prefix_logprobs if share_prefix else full_sequence_logprobs

    def score(group: list[int]) -> None:
        scored = of_rows(model, [rows[i] for i in group], pad_id=pad_id)
        for i, values in zip(group, scored, strict=True):
            if not all(map(math.isfinite, values)):
                raise ModelError(f"Row {rows[i].id}: the model's log-likelihoods are {values[:3]}, which {NOT_FINITE}")
            logprobs[i] = values

    with scoring_mode(model):
        score_in_groups(score, sizes, device, tokens_per_batch=tokens_per_batch, progress=progress)
    return logprobs


def full_sequence_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Compute the same with one full sequence per choice, padded right: slower, but right for every causal model."""
    device = next(model.parameters()).device
    full = [TokenRow(row.id, row.context_ids + ids, len(row.context_ids)) for row in rows for ids in row.choice_ids]
    sums = torch.zeros(len(full), dtype=torch.float64)  # in float32, hundreds of nats have an error in the fifth digit
    for side in on_one_side([range(len(full))], [len(row.input_ids) for row in full], rope_limit(model)):
        padded = PaddingCollator(pad_id)([full[i] for i in side])
        batch = {name: tensor.to(device) for name, tensor in padded.items()}
        sums[side] = completion_logprobs(model, batch)[0].cpu().double().sum(-1)
    totals = iter(sums.tolist())
    return [[next(totals) for _ in row.choice_ids] for row in rows]


def _tokens_and_logits(row: ChoiceTokens, vocabulary: int, share_prefix: bool) -> tuple[int, int]:
    """Tokens and logits that a row adds to a forward pass."""
    if share_prefix:
        num_scored = sum(map(len, row.choice_ids))
        return len(row.context_ids) + num_scored, num_scored * vocabulary
    num_choices, longest = len(row.choice_ids), max(map(len, row.choice_ids))
    return num_choices * (len(row.context_ids) + longest), num_choices * longest * vocabulary
