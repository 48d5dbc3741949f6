"""Held-out loss: nats per completion token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from frozencore.errors import DataError, ModelError
from frozencore.tune.rows.batches import IGNORED, PaddingCollator
from frozencore.tune.rows.prompts import TokenRow
from frozencore.tune.scoring.logits import NOT_FINITE, token_logprobs
from frozencore.tune.scoring.memory import score_in_groups
from frozencore.tune.scoring.mode import scoring_mode, vocabulary_of
from frozencore.tune.scoring.virtual_tokens import logits_at
from frozencore.words import Progress


def held_out_loss(
    model: nn.Module,
    rows: Sequence[TokenRow],
    *,
    pad_id: int,
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> float:
    """Mean negative log-probability of the completion tokens, end tokens included, every token weighing the same.

    Raises:
        DataError: No row has a token to predict.
        ModelError: The loss is not finite.
    """
    device = next(model.parameters()).device
    collate = PaddingCollator(pad_id)
    vocabulary = vocabulary_of(model)
    sizes = [(len(row.input_ids), (len(row.input_ids) - row.num_context) * vocabulary) for row in rows]
    losses: list[tuple[float, int]] = []

    def score(group: list[int]) -> None:
        batch = {name: tensor.to(device) for name, tensor in collate([rows[i] for i in group]).items()}
        targets = batch.pop("labels")[:, 1:]
        wanted = (targets != IGNORED).any(0).nonzero().squeeze(-1)
        logits = logits_at(model, wanted, **batch)
        targets = targets[:, wanted]
        counted = targets != IGNORED
        logprobs = token_logprobs(logits, targets.clamp_min(0)) * counted
        losses.append((-float(logprobs.sum()), int(counted.sum())))

    with scoring_mode(model):
        score_in_groups(score, sizes, device, tokens_per_batch=tokens_per_batch, progress=progress)
    total, num_tokens = sum(loss for loss, _ in losses), sum(counted for _, counted in losses)
    if num_tokens == 0:
        raise DataError("A held-out loss needs rows with at least one completion token after another token.")
    if not math.isfinite(total):
        raise ModelError(f"The model's log-probabilities on held-out rows {NOT_FINITE}")
    return total / num_tokens
