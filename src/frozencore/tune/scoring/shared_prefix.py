"""Several continuations of one prompt, with the prompt computed once: where a model allows it, and by which way.

On the CPU, attention along a tree of prefixes needs no padding and the fewest operations; elsewhere one masked kernel
for the whole batch beats many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from frozencore.tune.rows.prompts import ChoiceTokens
from frozencore.tune.scoring.mode import base_of, forward_accepts, scoring_mode, vocabulary_of
from frozencore.tune.scoring.prefix_mask import prefix_mask_logprobs
from frozencore.tune.scoring.prefix_tree import prefix_tree_logprobs


def can_share_prefix(model: nn.Module) -> bool:
    """Whether the model's attention takes any mask and any positions, and nothing else joins its tokens.

    Sliding windows, recurrent states, flash kernels and models without explicit positions are left to full sequences.
    """
    base = base_of(model)
    if getattr(base, "_is_stateful", False) or not forward_accepts(
        model, "attention_mask", "position_ids", "logits_to_keep"
    ):
        return False
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        return False
    if base.config._attn_implementation not in ("sdpa", "eager"):
        return False
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)
    return plain and _keeps_choices_apart(model)


def shared_prefix_logprobs(model: nn.Module, rows: Sequence[ChoiceTokens], *, pad_id: int) -> list[list[float]]:
    """Summed token log-probabilities, in nats, of every choice of every row."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and base_of(model).config.get_text_config()._attn_implementation == "sdpa":
        return prefix_tree_logprobs(model, rows)
    return prefix_mask_logprobs(model, rows, pad_id=pad_id)


def _keeps_choices_apart(model: nn.Module) -> bool:
    """Whether a choice's score is free of the choice before it, which an ignored mask or position would mix in."""
    last = vocabulary_of(model) - 1
    with scoring_mode(model):
        scores = [
            shared_prefix_logprobs(model, [ChoiceTokens("probe", [0, last], [first, [last, 0, last]])], pad_id=0)[0][1]
            for first in ([0], [last, last, last])
        ]
    return abs(scores[0] - scores[1]) <= 1e-3 or not all(map(torch.isfinite, torch.tensor(scores)))
