"""The trained model as a plain transformers folder, whose card repeats the licences of what it read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from frozencore.whole_file import whole_folder
from packed_text import END, PackedText
from recipe import Recipe


def save_model(model: Qwen2ForCausalLM, text: PackedText, folder: Path, *, card: str, shard_size: str) -> None:
    """A plain transformers folder in bfloat16, with its tokenizer and card."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text.tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=model.config.max_position_embeddings,
    )
    rounded = Qwen2ForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    with whole_folder(folder, overwrite=True) as aside:
        rounded.save_pretrained(aside, max_shard_size=shard_size)
        tokenizer.save_pretrained(aside)
        (aside / "README.md").write_text(card, encoding="utf-8")


def card_of(recipe: Recipe, last: dict[str, Any], *, num_weights: int, num_tokens: int, licences: str) -> str:
    """What the model is, what it read, and under which licences that stands.

    Args:
        last: The history's last entry.
        num_tokens: Of one pass.
    """
    return f"""---
language: en
license: other
license_name: mixed-see-card
pipeline_tag: text-generation
---
# House model

A Qwen2-architecture language model of {num_weights:,} parameters: bfloat16, tied embeddings,
{recipe.vocabulary:,} tokens, {recipe.layers} layers of width {recipe.hidden}, context {recipe.length}.
Made by `benchmarks/house/pretrain.py` to measure on, not to be asked for facts.

It saw {last["tokens"]:,} tokens, {last["tokens"] / num_tokens:.1f} passes over {num_tokens:,};
held-out loss {last["held_out_loss"]:.4f} nats a token. Seed {recipe.seed}, highest rate {recipe.rate:g},
{last["step"]} steps of {recipe.rows} rows of {recipe.length} tokens.

Its text stands under the licences below; attribution is owed to the sources named.

{licences}
"""


def licences_of(corpus: Path) -> str:
    """The sources with their licences, as the corpus's own README has them.

    Raises:
        SystemExit: It has none: a model whose text's licences are unknown is not saved.
    """
    readme = corpus / "README.md"
    lines = readme.read_text(encoding="utf-8").split("\n") if readme.exists() else []
    heads = [i for i, line in enumerate(lines) if line.startswith("## ")]
    for head, after in pairwise([*heads, len(lines)]):
        if "licence" in lines[head]:
            return "\n".join(lines[head:after]).strip()
    raise SystemExit(f"{readme} needs a section on licences ('## ... licence ...'), which the model's card repeats.")
