"""How many rows of an optimiser step go through the model at once: as many as fit, since fewer only take longer.

Eight at once were trained on 1.4 to 3.6 times as fast as one after the other (a CPU core, models of a million
parameters, rows of 10 to 60 tokens, one length or many). The step is the same to rounding: its loss is the mean over
the completion tokens of all its rows. Those that fit go in groups of similar length
(:mod:`frozencore.tune.training.by_length`) where less padding is worth another pass.
"""

from __future__ import annotations

from typing import Any

from frozencore.device import memory_of

SHARE_OF_MEMORY = 0.5  # beside the weights; the rest is for the allocator's gaps, the scoring, and other programs
LOGIT_BYTES = 12  # of a token and a word of the vocabulary: as computed, in float32, and their gradient


def rows_at_once(rows_a_step: int, longest: int, model: Any, *, padding_free: bool = False) -> int:
    """The largest divisor of a step's rows that fits into the memory of the model's device, at the longest row.

    The memory is the device's whole, not what is free: a run that is resumed cuts its steps as before.

    Args:
        longest: Tokens of the longest training row.
        model: Of transformers, adapted or not.
        padding_free: They are laid end to end in one row, over all of which attention runs.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    there = SHARE_OF_MEMORY * (memory_of(next(model.parameters()).device) - weights)

    def of(rows: int) -> int:
        return row_bytes(rows * longest, model) if padding_free else rows * row_bytes(longest, model)

    return next((n for n in range(rows_a_step, 1, -1) if rows_a_step % n == 0 and of(n) <= there), 1)


def row_bytes(length: int, model: Any) -> int:
    """About what a row of that many tokens keeps for the backward pass through frozen layers: rather more than less."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    of_a_layer = 12 * hidden + 5 * inner + config.num_attention_heads * length
    values = config.num_hidden_layers * of_a_layer * next(model.parameters()).element_size()
    return length * (values + config.vocab_size * LOGIT_BYTES)
