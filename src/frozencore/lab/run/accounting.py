"""What an adapter costs: trainable values, optimiser state, stored bytes.

Shapes: a target matrix is (m, n), outputs and inputs; r is the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from frozencore.maths.linalg import Shape

ADAM_STATES = 2  # first and second moment
FLOAT32_BYTES = 4


def basis_bytes(shapes: Iterable[Shape], rank: int, dtype: torch.dtype) -> int:
    """Bytes of the stored P and Q: ``Σ min(r, m, n) (m + n)`` values of that dtype."""
    return sum(min(rank, m, n) * (m + n) for m, n in shapes) * dtype.itemsize


def training_state_bytes(num_parameters: int) -> int:
    """Bytes of float32 gradients and AdamW states beside the parameters: 12 per trainable value."""
    return num_parameters * FLOAT32_BYTES * (1 + ADAM_STATES)


def optimiser_bytes(model: nn.Module, rank: int | None) -> int:
    """Bytes of float32 gradients and optimiser states beside what a model trains.

    Args:
        rank: Of the optimiser's state (GaLore, APOLLO); None for AdamW. Of a trained matrix (m, n) it holds two moments
            of the gradient in k = min(r, m, n) directions of the smaller side, and those directions; of anything else
            what AdamW holds.
    """
    if rank is None:
        return training_state_bytes(trainable_parameters(model))
    count = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            small, *large = sorted(parameter.shape)
            kept = min(rank, small) * (small + ADAM_STATES * large[0]) if large else ADAM_STATES * small
            count += parameter.numel() + kept
    return FLOAT32_BYTES * count


def trainable_parameters(model: nn.Module) -> int:
    """Values that an optimiser would get."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that an optimiser holds for its parameters, step counters left out."""
    states: Iterable[Mapping[str, object]] = optimizer.state.values()
    return sum(
        value.numel() * value.element_size()
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
