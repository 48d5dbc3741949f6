"""Read the tokenizer of a model."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer


def read_tokenizer(loading: dict[str, Any]) -> Any:
    """Read the tokenizer of a model; refuse the one without words that transformers makes where there is none.

    Args:
        loading: The arguments of :func:`frozencore.files.hub.safe_loading`.
    """
    tokenizer = AutoTokenizer.from_pretrained(**loading)
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ValueError("its tokenizer knows no words, as tokenizer.json or its like is missing.")
    return tokenizer
