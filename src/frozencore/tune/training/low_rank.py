"""Optimisers whose state has a rank: how transformers is told of them, and how their checkpoints are read again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

PLAIN = "adamw_torch_fused"
OPTIONS = {
    "galore_adamw": "scale=0.25",  # the paper's
    "apollo_adamw": "scale=1.0, proj=random, scale_type=channel",
}
"""Beside rank and gap, by the name that transformers gives the optimiser."""
PROJECTORS = {
    "galore_adamw": ("galore_torch.galore_projector", "GaLoreProjector"),
    "apollo_adamw": ("apollo_torch.random_projector", "GradientProjector"),
}


def optimiser_arguments(
    model: nn.Module, optimiser: str, rank: int | None, num_steps: int, rounds: int
) -> dict[str, Any]:
    """What ``TrainingArguments`` are told.

    Args:
        rounds: How often the directions are chosen in ``num_steps`` optimiser steps.
    """
    if optimiser == PLAIN:
        return {"optim": optimiser}
    trained = (name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2)
    gap = math.ceil(num_steps / rounds)
    return {
        "optim": optimiser,
        "optim_target_modules": [name.removesuffix(".weight") for name in trained],
        "optim_args": f"rank={rank}, update_proj_gap={gap}, {OPTIONS[optimiser]}",
    }


@contextmanager
def readable_state(optimiser: str) -> Iterator[None]:
    """The directions are objects of the optimiser's own in a checkpoint, which torch reads where they are named."""
    if optimiser == PLAIN:
        yield
        return
    module, name = PROJECTORS[optimiser]
    with torch.serialization.safe_globals([getattr(import_module(module), name)]):
        yield
