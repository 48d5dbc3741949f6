"""The size of a model from its configuration alone, and the memory that a run on it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.targets import attention_shapes

TOKENS_A_ROW = 128  # where the rows cannot be read


@dataclass(frozen=True)
class ModelSize:
    """Values of a model, and the shapes of its attention projections."""

    num_parameters: int
    shapes: tuple[tuple[int, int], ...]


def size_of(config: PretrainedConfig) -> ModelSize:
    """The size of a model with that configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ModelSize(sum(p.numel() for p in model.parameters()), attention_shapes(model))


def memory_bytes(config: RunConfig, size: ModelSize) -> int:
    """Bytes of weights, moments and activations of a run."""
    weight_bytes = 4 if config.dtype == "float32" else 2
    at_once = config.rows_a_step if config.batch_size == "auto" else config.batch_size
    activations = 34 * TOKENS_A_ROW * at_once * int(size.num_parameters**0.5) * weight_bytes
    return size.num_parameters * weight_bytes + moment_bytes(config, size) + activations


def moment_bytes(config: RunConfig, size: ModelSize) -> int:
    """Bytes of the moments that a run's bases are made from."""
    needs = config.moments_needed
    values = 0
    for m, n in size.shapes:
        values += m * n * ("cross" in needs) + n * n * ("input_outer" in needs) + m * m * ("error_outer" in needs)
    return 4 * values
