"""Merging into a quantised layer goes into a copy of it: a rounded weight does not come back by subtraction."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from frozencore.errors import ModelError


def set_aside(layer: Any) -> nn.Module:
    """Give an adapter layer a copy of its quantised layer to merge into, and return the original.

    Raises:
        ModelError: The quantiser cannot take a changed weight.
    """
    backend = layer.quantization_backend
    if not backend.supports_merge:
        raise ModelError(
            f"A weight quantised by {backend.backend_name} cannot take a merged update. "
            "Keep the adapter unmerged, or load the base model without quantisation."
        )
    warnings.warn(
        f"Merging rounds the sum to the grid of {backend.backend_name} weights, which changes what the model says. "
        "Measure the merged model, or keep the adapter unmerged.",
        stacklevel=3,
    )
    owner = _owner(layer)
    original = owner.base_layer
    owner.base_layer = copy.deepcopy(original)
    return original


def put_back(layer: Any, original: nn.Module) -> None:
    """Return the layer that was set aside to its place."""
    _owner(layer).base_layer = original


def _owner(layer: Any) -> Any:
    """The adapter layer, this one or one below it, that holds the plain layer."""
    while isinstance(layer.base_layer, BaseTunerLayer):
        layer = layer.base_layer
    return layer
