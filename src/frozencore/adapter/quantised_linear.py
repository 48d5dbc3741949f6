"""Frozen cores on a quantised linear layer.

Its weight can be read and trained on only while it is as it was loaded. Merging goes into a copy of it: a rounded
weight does not come back by subtraction.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from frozencore.adapter.linear import FrozenCoreLinear
from frozencore.calibration.preserve import refuse_rewritten
from frozencore.errors import ModelError


class FrozenCoreQuantisedLinear(FrozenCoreLinear):
    """Frozen cores on a linear layer with a quantisation backend of PEFT's."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, name: str, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, name, **kwargs)
        self._unmerged: list[nn.Module] = []  # in a list, where torch does not take it for a part of the model

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """As without quantisation."""
        if torch.is_grad_enabled():
            _require_as_loaded(self)
        return super().forward(x, *args, adapter_names=adapter_names, **kwargs)

    def get_base_weight(self) -> Tensor:
        """As PEFT's, which would read a weight that was rewritten for inference as noise."""
        _require_as_loaded(self)
        return super().get_base_weight()

    def dense_weight(self) -> Tensor:
        """W dequantised, m x n."""
        try:
            return super().dense_weight()
        except (TypeError, NotImplementedError) as error:
            raise ModelError(
                f"The quantised weight of layer {self.name!r} cannot be read: {error} "
                "Use a constructor that does not look at weights, such as fcca, or an unquantised base model."
            ) from error

    def unmerge(self) -> None:
        """Return the layer that was set aside to its place."""
        if self._unmerged:
            _owner(self).base_layer = self._unmerged.pop()
            self.merged_adapters.clear()
        else:
            super().unmerge()

    def _add_to_weight(self, adapter_name: str, sign: float, *, check: bool) -> None:
        if not self.merged:
            self._set_aside()
        super()._add_to_weight(adapter_name, sign, check=check)

    def _set_aside(self) -> None:
        """Put a copy of the quantised layer in its place, to merge into."""
        backend = self.quantization_backend
        if not backend.supports_merge:
            raise ModelError(
                f"A weight quantised by {backend.backend_name} cannot take a merged update. "
                "Keep the adapter unmerged, or load the base model without quantisation."
            )
        warnings.warn(
            f"Merging rounds the sum to the grid of {backend.backend_name} weights, which changes what the model "
            "says. Measure the merged model, or keep the adapter unmerged.",
            stacklevel=4,
        )
        owner = _owner(self)
        self._unmerged = [owner.base_layer]
        owner.base_layer = copy.deepcopy(owner.base_layer)


def _require_as_loaded(layer: Any) -> None:
    refuse_rewritten(layer.get_base_layer(), layer.name)


def _owner(layer: Any) -> Any:
    """The adapter layer, this one or one below it, that holds the plain layer."""
    while isinstance(layer.base_layer, BaseTunerLayer):
        layer = layer.base_layer
    return layer
