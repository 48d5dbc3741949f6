"""Log-probabilities from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of target tokens, in float32 or more: logits (..., vocabulary), targets (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
