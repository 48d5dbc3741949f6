"""What the house model is and how long it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Recipe:
    """All that decides the weights, but for the time limit; a checkpoint goes on under its own recipe only."""

    vocabulary: int = 8192
    hidden: int = 384
    intermediate: int = 896
    layers: int = 8
    heads: int = 6
    key_value_heads: int = 2
    rows: int = 128
    length: int = 512
    passes: float = 10.0
    rate: float = 2e-3
    every: int = 200
    held_out_rows: int = 512
    seed: int = 0


def new_model(recipe: Recipe) -> Qwen2ForCausalLM:
    """Random weights of the recipe's seed."""
    torch.manual_seed(recipe.seed)
    config = Qwen2Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=recipe.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,  # a pad token of its own would keep the row of <|endoftext|> at zero
        use_cache=True,
    )
    return Qwen2ForCausalLM(config)


def flops_per_token(model: nn.Module, recipe: Recipe) -> float:
    """Forward and backward: six a weight (the tied embedding is one product), and causal attention's two products."""
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    return 6 * weights + 6 * recipe.layers * recipe.hidden * recipe.length


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
