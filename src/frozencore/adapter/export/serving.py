"""The limits of vLLM that an export prints: ranks of LoRA slots, and head sizes of the CPU build."""

from __future__ import annotations

import json
from pathlib import Path

from frozencore.files.names import MODEL_CONFIG

VLLM_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of ``--max-lora-rank`` (MaxLoRARanks of vLLM). An adapter may have any rank below."""
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes of vLLM's CPU build (get_supported_head_sizes); with others it ends at the first request."""


def vllm_max_rank(rank: int) -> int | None:
    """The smallest ``--max-lora-rank`` that admits a rank; None if vLLM has none."""
    return next((largest for largest in VLLM_MAX_RANKS if largest >= rank), None)


def head_size(model: Path) -> int | None:
    """The values of an attention head of the model in a folder; None if its configuration does not give it."""
    config = json.loads((model / MODEL_CONFIG).read_text(encoding="utf-8"))
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (width // heads if width and heads else None)
