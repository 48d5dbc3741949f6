"""Choice by log-likelihood: the choice whose tokens have the highest summed log-probability after the prompt.

If the model allows it, the prompt is computed once for all its choices: a prompt and its choices are one sequence. By a
mask each choice sees the prompt and itself, and its positions continue from the prompt's. Prompts are padded left and
choices right, so that the columns of the needed logits are the same in every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from frozencore.errors import ModelError
from frozencore.progress import Progress, no_progress
from frozencore.tune.rows.row import ChoiceTokens, TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, pad, score_in_groups
from frozencore.tune.scoring.forward import (
    NOT_FINITE,
    Prediction,
    forward_accepts,
    row_losses,
    scoring_mode,
    token_logprobs,
    vocabulary_of,
)
from frozencore.unwrapped_model import base_of


def predict_choices(
    model: nn.Module,
    rows: Sequence[ChoiceTokens],
    *,
    pad_id: int,
    length_normalised: bool = False,
    progress: Progress = no_progress,
) -> list[Prediction]:
    """Predict the likeliest choice of every row, in order; the first of equally likely ones.

    If ``length_normalised``, log-likelihoods per character of the choice are compared (the harness's ``acc_norm``).

    Raises:
        ModelError: A log-likelihood is not finite, or one row does not fit in memory.
    """
    logprobs = choice_logprobs(model, rows, pad_id=pad_id, progress=progress)
    predictions = []
    for row, values in zip(rows, logprobs, strict=True):
        if length_normalised:
            values = [v / len(label.strip()) for v, label in zip(values, row.labels, strict=True)]
        choice, gold = row.labels[max(range(len(values)), key=values.__getitem__)], row.labels[row.right]
        predictions.append(Prediction(row.id, choice, gold, choice == gold, tuple(values)))
    return predictions


def choice_logprobs(
    model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int, progress: Progress = no_progress
) -> list[list[float]]:
    """Summed log-probabilities, in nats, of the tokens of every choice, in the rows' order."""
    share_prefix = can_share_prefix(model)
    vocabulary = vocabulary_of(model)
    sizes = []  # tokens and logits that a row adds to a forward pass
    for row in rows:
        if share_prefix:
            num_scored = sum(map(len, row.choice_ids))
            num_tokens = len(row.context_ids) + num_scored
        else:
            num_scored = len(row.choice_ids) * max(map(len, row.choice_ids))
            num_tokens = len(row.choice_ids) * row.num_tokens
        sizes.append((num_tokens, num_scored * vocabulary))
    logprobs: list[list[float]] = [[] for _ in rows]
    of_rows = prefix_mask_logprobs if share_prefix else full_sequence_logprobs

    def score(group: list[int]) -> None:
        scored = of_rows(model, [rows[i] for i in group], pad_id=pad_id)
        for i, values in zip(group, scored, strict=True):
            if not all(map(math.isfinite, values)):
                raise ModelError(f"Row {rows[i].id}: the model's log-likelihoods are {values[:3]}, which {NOT_FINITE}")
            logprobs[i] = values

    with scoring_mode(model):
        score_in_groups(score, sizes, next(model.parameters()).device, progress=progress)
    return logprobs


def can_share_prefix(model: nn.Module) -> bool:
    """Return whether the model's attention accepts any mask and positions, and nothing else mixes tokens.

    Models with sliding windows, recurrent states, flash kernels or without explicit positions use full sequences.
    """
    base, adapters = base_of(model), getattr(model, "peft_config", {}).values()
    if not (
        forward_accepts(model, "attention_mask", "position_ids", "logits_to_keep")
        and not getattr(base, "_is_stateful", False)
        and not any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
        and base.config._attn_implementation in ("sdpa", "eager")
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)
    ):
        return False
    # a choice's score must not depend on the previous choice, as it does in a model that ignores the mask
    last = vocabulary_of(model) - 1
    probes = [ChoiceTokens("probe", [0, last], [first, [last, 0, last]]) for first in ([0], [last, last, last])]
    try:
        with scoring_mode(model):
            one, other = (prefix_mask_logprobs(model, [probe], pad_id=0)[0][1] for probe in probes)
    except Exception:  # a model's own attention may require another mask, and raises any error
        return False
    return abs(one - other) <= 1e-3 or not (math.isfinite(one) and math.isfinite(other))


def full_sequence_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Compute the same with one full sequence per choice, padded right: slower, but right for every causal model."""
    device = next(model.parameters()).device
    full = [TokenRow(row.id, row.context_ids + ids, len(row.context_ids)) for row in rows for ids in row.choice_ids]
    batch = {name: tensor.to(device) for name, tensor in PaddingCollator(pad_id)(full).items()}
    return _by_row(-row_losses(model, batch).cpu(), rows)


def _by_row(sums: Tensor, rows: Sequence[ChoiceTokens]) -> list[list[float]]:
    return [one.tolist() for one in sums.split([len(row.choice_ids) for row in rows])]


_PROMPT, _PADDING = 0, -1  # parts of a row; the choices are 1, 2, ...


def prefix_mask_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Summed token log-probabilities, in nats, of every choice of every row: one masked sequence a row."""
    device = next(model.parameters()).device
    prompts, prompt_mask = pad([row.context_ids for row in rows], pad_id, side="left")
    inputs: list[list[int]] = [[] for _ in rows]
    positions: list[list[int]] = [[] for _ in rows]
    parts: list[list[int]] = [[] for _ in rows]
    scored: list[tuple[int, int, int]] = []  # each token's row, the column of its logits, and the token
    for i, row in enumerate(rows):
        for part, choice in enumerate(row.choice_ids, start=1):
            columns = [0, *range(len(inputs[i]) + 1, len(inputs[i]) + len(choice))]  # 0: the prompt's last token
            scored += [(i, column, token) for column, token in zip(columns, choice, strict=True)]
            inputs[i] += choice[:-1]  # a choice's last token is scored but never read
            positions[i] += range(len(row.context_ids), len(row.context_ids) + len(choice) - 1)
            parts[i] += [part] * (len(choice) - 1)
    answers, answer_positions, answer_parts = (
        pad(ids, padding, side="right")[0] for ids, padding in ((inputs, pad_id), (positions, 0), (parts, _PADDING))
    )
    part_of = torch.cat([torch.where(prompt_mask == 1, _PROMPT, _PADDING), answer_parts], dim=1)
    logits = model(
        input_ids=torch.cat([prompts, answers], dim=1).to(device),
        attention_mask=_mask(part_of.to(device), base_of(model).dtype),
        position_ids=torch.cat([(prompt_mask.cumsum(1) - 1) * prompt_mask, answer_positions], dim=1).to(device),
        use_cache=False,
        logits_to_keep=1 + answers.shape[1],  # from the prompt's last token on
    ).logits
    owner, column, target = torch.tensor(scored, device=device).unbind(1)
    of_tokens = token_logprobs(logits[owner, column], target).cpu().double()
    lengths = torch.tensor([len(choice) for row in rows for choice in row.choice_ids])
    choice_of = torch.arange(len(lengths)).repeat_interleave(lengths)
    return _by_row(of_tokens.new_zeros(len(lengths)).index_add_(0, choice_of, of_tokens), rows)


def _mask(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask (rows, 1, length, length): a token sees the prompt and its own part, up to itself."""
    query, key = part.unsqueeze(2), part.unsqueeze(1)
    length = part.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=part.device).tril()
    seen = causal & ((query == key) | ((key == _PROMPT) & (query != _PADDING)))
    return torch.zeros(seen.shape, dtype=dtype, device=part.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
