"""Log-probabilities from logits."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from frozencore.errors import ModelError

NOT_FINITE = (
    "are not finite. Look for NaN in the weights of the model, and for a core that is too large in its adapter: "
    "`frozencore inspect` shows the norms."
)


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of target tokens, in float32 or more: logits (..., vocabulary), targets (...)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


class RequireFinite(LogitsProcessor):
    """Stops a generation whose logits are not finite: the likeliest of them means nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits as they are.

        Raises:
            ModelError: The largest of a row is NaN or infinite.
        """
        if not bool(torch.isfinite(scores.amax(-1)).all()):
            raise ModelError(f"The logits of a generated token {NOT_FINITE}")
        return scores
