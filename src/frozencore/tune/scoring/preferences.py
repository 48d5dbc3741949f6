"""DPO's loss on preferences, where the reference is the model without its adapter (Rafailov et al. 2023, equation 7).

A pair of a prompt x, a chosen answer y and a rejected answer z has the margin

    m = beta (log p(y|x) - log q(y|x) - log p(z|x) + log q(z|x))

with p of the model and q of the reference. Its loss is ``-log sigmoid(m)``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import softplus

from frozencore.calibration.batches import Batch
from frozencore.calibration.loss import LossFn
from frozencore.errors import ModelError
from frozencore.tune.rows import PreferenceRow
from frozencore.tune.rows.token_batches import PaddingCollator, score_in_groups
from frozencore.tune.scoring import Prediction, TaskScore
from frozencore.tune.scoring.forward import NOT_FINITE, completion_logprobs, scoring_mode, vocabulary_of
from frozencore.words import Progress

ANSWERS = ("chosen", "rejected")


def first_loss(beta: float) -> LossFn:
    """DPO's loss at a zero adapter, for calibration: the model is its own reference."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        chosen, rejected = completion_logprobs(model, batch)[0].sum(1).chunk(2)
        gap = chosen - rejected
        return softplus(-beta * (gap - gap.detach())).mean()

    return loss


def score_preferences(
    model: nn.Module, rows: Sequence[PreferenceRow], beta: float, *, pad_id: int, progress: Progress | None = None
) -> TaskScore | None:
    """Score DPO's loss on pairs, and the share of pairs with a positive margin; None for a model without an adapter.

    Without an adapter every margin is 0: the loss is log 2, and the accuracy is that of a random guess.

    Raises:
        ModelError: The log-probabilities are not finite.
    """
    if not isinstance(model, PeftModel):
        return None
    started, device, collate = time.perf_counter(), next(model.parameters()).device, PaddingCollator(pad_id)
    num_answer = [row.num_tokens - 2 * row.num_context for row in rows]
    sizes = [(row.num_tokens, n * vocabulary_of(model)) for row, n in zip(rows, num_answer, strict=True)]
    gains: dict[int, tuple[float, float]] = {}

    def score(group: list[int]) -> None:
        batch = {name: tensor.to(device) for name, tensor in collate([rows[i] for i in group]).items()}
        own = completion_logprobs(model, batch)[0].sum(1, dtype=torch.float64)
        with model.disable_adapter():
            reference = completion_logprobs(model, batch)[0].sum(1, dtype=torch.float64)
        chosen, rejected = (beta * (own - reference)).chunk(2)
        gains.update(zip(group, zip(chosen.tolist(), rejected.tolist(), strict=True), strict=True))

    with scoring_mode(model):
        score_in_groups(score, sizes, device, progress=progress)
    margins = [gains[i][0] - gains[i][1] for i in range(len(rows))]
    if not all(map(math.isfinite, margins)):
        raise ModelError(f"The model's log-probabilities on held-out rows {NOT_FINITE}")
    predictions = tuple(
        Prediction(row.id, ANSWERS[margin <= 0], ANSWERS[0], margin > 0, gains[i])
        for i, (row, margin) in enumerate(zip(rows, margins, strict=True))
    )
    losses = softplus(-torch.tensor(margins, dtype=torch.float64))
    return TaskScore("preferences", float(losses.mean()), predictions, time.perf_counter() - started, chance=0.5)
