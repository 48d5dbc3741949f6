"""How often a training is refreshed, and how many of its steps are summed for it (measured in docs/refreshing.md)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from frozencore.adapter.layer import FrozenCoreLayer, is_linear, layer_shape

COST = 0.1  # of the products of a training that gathering may add
ROWS_OF_A_ROUND = 100  # of fewer, bases lose more than their being newer brings
STEPS_OF_A_ROUND = 6  # in fewer, fresh optimiser state gets nowhere
MOST_ROUNDS = 16  # that ``auto`` chooses: each makes the adapter larger


def rounds_for(num_rows: int, num_steps: int) -> int:
    """How many rounds pay in a training of so many rows, each epoch's counted, and optimiser steps: ``auto``."""
    return max(1, min(num_rows // ROWS_OF_A_ROUND, num_steps // STEPS_OF_A_ROUND, MOST_ROUNDS))


def share_to_gather(model: nn.Module, layers: Mapping[str, FrozenCoreLayer], cost: float) -> float:
    """Of the steps, how many are summed: a product for each weight of the layers, beside two for each of the model."""
    seen = sum(layer.in_features * layer.out_features for layer in layers.values())
    shapes = (layer_shape(module) for module in model.modules() if is_linear(module))
    return min(1.0, cost * 2 * sum(m * n for m, n in shapes) / seen)
