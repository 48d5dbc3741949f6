"""A linear layer with frozen cores, plain or quantised: ``y = W x + b + s·P R Qᵀ x``.

The base layer and R are called as modules, so that hooks, FSDP and Opacus see them. Between them stand two products:

    z = x Q,    u = R(z),    y = W x + b + s·u Pᵀ

For the backward pass autograd keeps z, r values a token in the dtype of R.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import quantization_extra_repr
from torch import Tensor, nn
from torch.nn.functional import linear

from frozencore.adapter.layer import FrozenCoreLayer, RowCores
from frozencore.calibration.preserve import refuse_rewritten
from frozencore.errors import ModelError


class FrozenCoreLinear(nn.Module, FrozenCoreLayer):
    """Frozen cores on ``nn.Linear`` or ``Conv1D``."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, name: str, **kwargs: Any) -> None:
        super().__init__()
        FrozenCoreLayer.__init__(self, base_layer, name, **kwargs)
        self._active_adapter = adapter_name
        self.register_load_state_dict_post_hook(_look_again)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room_for(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """
        Args:
            adapter_names: The adapter of each row of x, in place of the active ones; ``"__base__"`` means none.
        """
        if adapter_names is not None:
            self.require_unmerged()
            self._require_rows(len(adapter_names), x)
        if self.disable_adapters or self.merged:
            if self.disable_adapters and self.merged:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        if adapter_names is not None:
            return self._add_rows(self.base_layer(x, *args, **kwargs), x, adapter_names)
        if self.row_cores is not None:
            return self._forward_rows(self.row_cores, x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        active: Any = self.active_adapters
        for adapter_name in active:
            if adapter_name in self.frozencore_R:
                result = self._plus_core(result, x, adapter_name)
        return result

    def _plus_core(self, y: Tensor, x: Tensor, adapter_name: str) -> Tensor:
        """Add an adapter's part to the base layer's output."""
        P, Q, _ = self._trained_factors(adapter_name)
        core: Any = self.frozencore_R[adapter_name]
        return self._plus(y, x, P, Q, core, self.frozencore_scale[adapter_name])

    def _plus(self, y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: nn.Linear | Tensor, scale: float) -> Tensor:
        own: Any = self
        return plus_core(y, own._cast_input_dtype(x, Q.dtype), P, Q, R, scale)

    def _forward_rows(self, rows: RowCores, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute each row with its own core, on one common basis."""
        self._require_rows(rows.R.shape[0], x)
        result = self.base_layer(x, *args, **kwargs)
        if rows.basis is None:
            return result
        P, Q, scale = rows.basis
        return self._plus(result, x, P, Q, rows.R, scale)

    def _require_rows(self, num_rows: int, x: Tensor) -> None:
        if x.shape[0] != num_rows:
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{num_rows} and {len(x)} respectively. Each row must be one input of layer {self.name!r}."
            )

    def _add_rows(self, result: Tensor, x: Tensor, adapter_names: list[str]) -> Tensor:
        """The base layer's output with each row's own update added."""
        for adapter_name in dict.fromkeys(adapter_names):
            if adapter_name in self.frozencore_R:
                mine = [row for row, name in enumerate(adapter_names) if name == adapter_name]
                rows = torch.tensor(mine, device=x.device)
                result = result.index_copy(0, rows, self._plus_core(result[rows], x[rows], adapter_name))
        return result

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def __repr__(self) -> str:
        return "frozencore." + super().__repr__()


class FrozenCoreQuantisedLinear(FrozenCoreLinear):
    """Frozen cores on a linear layer with a quantisation backend of PEFT's.

    Its weight can be read and trained on only as it was loaded. Merging changes a copy, because subtraction does not
    restore a rounded weight.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, name: str, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, name, **kwargs)
        self._unmerged: list[nn.Module] = []  # in a list, so that torch does not register it as a submodule

    def forward(self, x: Tensor, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any) -> Tensor:
        """Compute as for a plain layer; refuse to train on a weight that was rewritten for inference."""
        if torch.is_grad_enabled():
            self._require_as_loaded()
        return super().forward(x, *args, adapter_names=adapter_names, **kwargs)

    def get_base_weight(self) -> Tensor:
        """The base weight. PEFT's method would read noise from a weight that was rewritten for inference."""
        self._require_as_loaded()
        return super().get_base_weight()

    def _require_as_loaded(self) -> None:
        own: Any = self
        refuse_rewritten(own.get_base_layer(), self.name)

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
        """Restore the original quantised layer."""
        if self._unmerged:
            _owner(self).base_layer = self._unmerged.pop()
            self.merged_adapters.clear()
        else:
            super().unmerge()

    def _set_aside(self) -> None:
        """Replace the quantised layer by a copy to merge into."""
        backend = self.quantization_backend
        if not backend.supports_merge:
            raise ModelError(
                f"A weight quantised by {backend.backend_name} cannot take a merged update. "
                "Keep the adapter unmerged, or load the base model without quantisation."
            )
        warnings.warn(
            f"Merging rounds the sum to the grid of {backend.backend_name} weights, which changes what the model "
            "says. Measure the merged model, or keep the adapter unmerged.",
            stacklevel=3,
        )
        owner = _owner(self)
        self._unmerged = [owner.base_layer]
        owner.base_layer = copy.deepcopy(owner.base_layer)


def _look_again(layer: Any, _: Any) -> None:
    layer.look_again()


def _owner(layer: Any) -> Any:
    """The adapter layer that holds the plain layer: this one, or one nested in it."""
    while isinstance(layer.base_layer, BaseTunerLayer):
        layer = layer.base_layer
    return layer


def plus_core(y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: nn.Linear | Tensor, scale: float) -> Tensor:
    """``y + s·P R Qᵀ x`` in the dtype of y.

    The product with R is in the dtype of R, the others are in that of P and Q.

    Args:
        y: The base layer's output (..., m).
        x: Its input (..., n), in the dtype of Q.
        R: A linear layer r -> r; or r x r; or rows x r x r, a core for each row of x.
    """
    z = x @ Q
    u = _through(z.to(R.dtype), R) if isinstance(R, Tensor) else R(z.to(R.weight.dtype))
    u = u.to(P.dtype)
    if y.dtype == P.dtype == z.dtype:  # z has another dtype under autocast, which would round a wider y
        m, r = P.shape
        return torch.addmm(y.reshape(-1, m), u.reshape(-1, r), P.mT, alpha=scale).view(y.shape)
    return y + ((u * scale) @ P.mT).to(y.dtype)


def _through(z: Tensor, R: Tensor) -> Tensor:
    """``z Rᵀ`` with one core, or with each row's own: z (..., r) with the tokens of a row contiguous."""
    if R.ndim == 2:
        return linear(z, R)
    rows, r, _ = R.shape
    if z.numel() == rows * r:  # one token a row, as in generation: bmm takes 2 to 5 times as long
        return (R.mT * z.reshape(rows, r, 1)).sum(1).view(z.shape)
    return torch.bmm(z.reshape(rows, -1, r), R.mT).view(z.shape)
