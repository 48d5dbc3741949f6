"""Log-likelihoods of several continuations of one prompt, with the prompt computed once.

A prompt and all its choices are one sequence: each choice sees the prompt and itself, by a mask, and its positions go
on from the prompt's. One forward pass thus scores a row without copying a cache or padding one choice to the length of
another. Prompts are padded left and choices right: the columns whose logits are wanted are then the same in every row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from frozencore.tune.rows.batches import pad
from frozencore.tune.rows.prompts import ChoiceTokens
from frozencore.tune.scoring.logits import token_logprobs
from frozencore.tune.scoring.mode import base_of

_PROMPT, _PADDING = 0, -1  # parts of a row; the choices are 1, 2, ...


def prefix_mask_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Summed token log-probabilities, in nats, of every choice of every row."""
    device = next(model.parameters()).device
    prompts, prompt_mask = pad([row.context_ids for row in rows], pad_id, side="left")
    # a choice's last token is scored but never read
    parts = [[k for k, choice in enumerate(row.choice_ids, start=1) for _ in choice[:-1]] for row in rows]
    inputs = [[token for choice in row.choice_ids for token in choice[:-1]] for row in rows]
    answers, _ = pad(inputs, pad_id, side="right")
    answer_parts, _ = pad(parts, _PADDING, side="right")
    part = torch.cat([torch.where(prompt_mask == 1, _PROMPT, _PADDING), answer_parts], dim=1)
    logits = model(
        input_ids=torch.cat([prompts, answers], dim=1).to(device),
        attention_mask=_mask(part.to(device), base_of(model).dtype),
        position_ids=_positions(part).to(device),
        use_cache=False,
        logits_to_keep=torch.arange(prompts.shape[1] - 1, part.shape[1], device=device),
    ).logits
    owner, column, target, choice_of = _scored(rows)
    scored = token_logprobs(logits[owner.to(device), column.to(device)], target.to(device)).cpu().double()
    flat = iter(scored.new_zeros(sum(len(row.choice_ids) for row in rows)).index_add_(0, choice_of, scored).tolist())
    return [[next(flat) for _ in row.choice_ids] for row in rows]


def _mask(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive (rows, 1, length, length): a token sees the prompt and its own part, up to itself."""
    query, key = part.unsqueeze(2), part.unsqueeze(1)
    length = part.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=part.device).tril()
    seen = causal & ((query == key) | ((key == _PROMPT) & (query != _PADDING)))
    return torch.zeros(seen.shape, dtype=dtype, device=part.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _positions(part: Tensor) -> Tensor:
    """A token's place in its prompt, or in its prompt and choice; 0 for padding."""
    within = torch.zeros_like(part)
    for k in range(_PROMPT, int(part.max()) + 1):
        own = part == k
        within += (own.cumsum(1) - 1) * own
    return within + (part > _PROMPT) * (part == _PROMPT).sum(1, keepdim=True)


def _scored(rows: Sequence[ChoiceTokens]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every scored token: its row, the column of its logits, itself, and which of all choices it belongs to."""
    scored: list[tuple[int, int, int, int]] = []
    num_choices = 0
    for owner, row in enumerate(rows):
        start = 1  # column 0 is the prompt's last token
        for choice in row.choice_ids:
            columns = [0, *range(start, start + len(choice) - 1)]
            scored += [(owner, column, token, num_choices) for column, token in zip(columns, choice, strict=True)]
            start += len(choice) - 1
            num_choices += 1
    owners, columns_, tokens, choices = torch.tensor(scored).unbind(1)
    return owners, columns_, tokens, choices
