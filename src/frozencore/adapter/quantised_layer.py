"""Frozen cores on a quantised linear layer. Its weight can be read, and trained on, only as it was loaded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from frozencore.adapter.layer import FrozenCoreLinear, have_same_bits
from frozencore.attributes import with_attributes
from frozencore.calibration.preserve import refuse_rewritten
from frozencore.errors import ModelError


class FrozenCoreQuantisedLinear(FrozenCoreLinear):
    """Frozen cores on a linear layer with a quantisation backend of PEFT's.

    Its weight can be read and trained on only as it was loaded. Merging changes a copy, because subtraction does not
    restore a rounded weight.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute as for a plain layer; refuse to train on a weight that was rewritten for inference."""
        if torch.is_grad_enabled():
            refuse_rewritten(self.get_base_layer(), self.name)
        return super().forward(x, *args, **kwargs)

    def get_base_weight(self) -> Tensor:
        """The base weight. PEFT's method would read noise from a weight that was rewritten for inference."""
        refuse_rewritten(self.get_base_layer(), self.name)
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

    def _backup_weight(self) -> None:
        """Replace the quantised layer by a copy to merge into."""
        backend = self.quantization_backend
        if not backend.supports_merge:
            raise ModelError(
                f"A weight quantised by {backend.backend_name} cannot take a merged update. "
                "Keep the adapter unmerged, or load the base model without quantisation."
            )
        warnings.warn(
            f"Merging rounds the sum to the grid of {backend.backend_name} weights, which changes the model's "
            "outputs. Measure the merged model, or keep the adapter unmerged.",
            stacklevel=3,
        )
        owner = self._owner()
        self._before_merge = (owner.base_layer,)  # in a tuple, so that torch does not register it as a submodule
        owner.base_layer = copy.deepcopy(owner.base_layer)

    def _original_weight(self) -> Tensor:
        weight: Tensor = self._before_merge[0].weight
        return weight

    def _restore_weight(self) -> None:
        (self._owner().base_layer,) = self._before_merge

    def _is_as_merged(self) -> bool:
        owner, weight = self._owner(), self.get_base_weight()
        with with_attributes(owner, base_layer=copy.deepcopy(self._before_merge[0])):
            for update in self._updates:
                self.set_base_weight(self._sum(self.get_base_weight(), update))
            return have_same_bits(self.get_base_weight(), weight)

    def _owner(self) -> Any:
        """The adapter layer around the plain layer: this one, or one nested in it."""
        layer: Any = self
        while isinstance(layer.base_layer, BaseTunerLayer):
            layer = layer.base_layer
        return layer
