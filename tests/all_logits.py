"""A model that computes every logit: its forward pass knows no ``logits_to_keep``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Qwen2ForCausalLM

from tiny import tiny_qwen2


class AllLogits(Qwen2ForCausalLM):
    """Qwen2 with the arguments of an older model."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=use_cache)


def tiny_all_logits(seed: int = 0) -> AllLogits:
    """The weights of ``tiny_qwen2``."""
    model: Any = tiny_qwen2(seed)
    model.__class__ = AllLogits
    return model
