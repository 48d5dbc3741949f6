"""Byte tokenizers, and the real data and model where a checkout has them beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from tiny import tiny_qwen2

SHARED = Path(__file__).parents[3] / "shared"
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture
def shared_data() -> Path:
    """The real benchmark rows, of the hub's schema."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED / "data"


@pytest.fixture
def tiny1m() -> Path:
    """A real pretrained Llama of a million parameters; it puts ``<s>`` in front and pads with ``</s>``."""
    if not (SHARED / "models" / "tiny1m").is_dir():
        pytest.skip("no ../shared/models/tiny1m beside this checkout")
    return SHARED / "models" / "tiny1m"


@pytest.fixture
def byte_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of one token a byte (258 in all), plus merges of the pairs given."""

    def make(*, adds_start: bool = False, chat: bool = False, merges: tuple[tuple[str, str], ...] = ()) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [*alphabet, *(left + right for left, right in merges)]
        tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
        if adds_start:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", model_max_length=512
        )
        fast.chat_template = CHAT_TEMPLATE if chat else None
        return fast

    return make


@pytest.fixture
def byte_model() -> nn.Module:
    """A tiny Qwen2 over the byte tokenizer's vocabulary."""
    return tiny_qwen2(vocab_size=300, max_position_embeddings=512)
