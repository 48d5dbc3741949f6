"""Log-likelihoods of several continuations of one prompt, with the prompt computed once.

Prompts are padded left, so that every row's continuation follows its last prompt token directly and distances in the
cache are distances in the text. One forward pass gives the first token of every choice; the cache rows are then
copied to the choices that have more, and a second pass over those few tokens gives the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from frozencore.lab.batches import LOGITS_BUDGET, pad
from frozencore.lab.prompts import ChoiceTokens
from frozencore.lab.scoring.mode import base_of, forward_accepts


def can_share_prefix(model: nn.Module) -> bool:
    """Whether the model's state after a prompt is a plain key/value cache that may be copied row by row.

    Sliding windows, recurrent states and models without explicit positions are left to full sequences.
    """
    base = base_of(model)
    if getattr(base, "_is_stateful", False) or not forward_accepts(
        model, "attention_mask", "position_ids", "past_key_values", "logits_to_keep"
    ):
        return False
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)


def shared_prefix_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Summed token log-probabilities, in nats, of every choice of every row."""
    device = next(model.parameters()).device
    tokens, mask = (t.to(device) for t in pad([row.context_ids for row in rows], pad_id, side="left"))
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    choices = [choice for row in rows for choice in row.choice_ids]
    owner = torch.tensor([i for i, row in enumerate(rows) for _ in row.choice_ids], device=device)
    going_on = [i for i, choice in enumerate(choices) if len(choice) > 1]

    cache = DynamicCache(config=base_of(model).config) if going_on else None
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
        logits_to_keep=1,
    )
    first = torch.tensor([choice[0] for choice in choices], device=device)
    totals = token_logprobs(output.logits[owner, -1], first)
    if cache is not None:
        vocabulary = output.logits.shape[-1]
        longest = max(len(choices[i]) for i in going_on) - 1
        chunk = max(1, LOGITS_BUDGET // (vocabulary * longest))
        for start in range(0, len(going_on), chunk):
            chosen = going_on[start : start + chunk]
            rest = _continue(model, [choices[i] for i in chosen], owner[chosen], mask, cache, pad_id)
            totals[chosen] += rest
    flat = iter(totals.tolist())
    return [[next(flat) for _ in row.choice_ids] for row in rows]


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Float32 log-probabilities of target tokens: logits (..., vocabulary), targets (...)."""
    logits = logits.float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def _continue(
    model: nn.Module, choices: list[list[int]], owner: Tensor, mask: Tensor, cache: DynamicCache, pad_id: int
) -> Tensor:
    """Log-probabilities of each choice after its first token, given its owner's row of the prompts' cache."""
    inputs, inputs_mask = (t.to(owner.device) for t in pad([c[:-1] for c in choices], pad_id, side="right"))
    targets, _ = pad([choice[1:] for choice in choices], pad_id, side="right")
    prefix_mask = mask[owner]
    positions = prefix_mask.sum(-1, keepdim=True) + torch.arange(inputs.shape[1], device=owner.device)
    output = model(
        input_ids=inputs,
        attention_mask=torch.cat([prefix_mask, inputs_mask], dim=-1),
        position_ids=positions,
        past_key_values=_rows_of(cache, owner),
        use_cache=True,
    )
    return (token_logprobs(output.logits, targets.to(owner.device)) * inputs_mask).sum(-1)


def _rows_of(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """A new cache that holds the given rows of another, which stays as it is."""
    return DynamicCache([(layer.keys[rows], layer.values[rows]) for layer in cache.layers])
