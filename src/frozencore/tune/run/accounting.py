"""What an adapter costs: values that train, bytes of state, stored bytes; formulas but for what a model itself tells.

Shapes: a target matrix is (m, n), outputs and inputs; r is the rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from frozencore.files.fingerprint import base_tensors, stored_tensors
from frozencore.maths.linalg import Shape
from frozencore.tune.training.state_held import total_bytes

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
        return training_state_bytes(values_at_once(model))
    count = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            small, *large = sorted(parameter.shape)
            kept = min(rank, small) * (small + ADAM_STATES * large[0]) if large else ADAM_STATES * small
            count += parameter.numel() + kept
    return FLOAT32_BYTES * count


def values_at_once(model: nn.Module) -> int:
    """Values that train at a moment: those that an optimiser would get."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def model_bytes(model: nn.Module) -> int:
    """Bytes of the base model's weights as they are loaded, whatever adapters are on it; tied ones count once."""
    return total_bytes(stored for _, tensor in base_tensors(model) for stored in stored_tensors(tensor))
