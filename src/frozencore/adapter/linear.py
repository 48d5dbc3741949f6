"""A linear layer with frozen cores, plain or quantised: ``y = W x + b + s·P R Qᵀ x``.

The base layer and R are called as modules, so that hooks, FSDP and Opacus see them. Between them stand two products:

    z = x Q,    u = R(z),    y = W x + b + s·u Pᵀ

For the backward pass autograd keeps z, r values a token in the dtype of R.

Mixed batches: each row uses the adapter that ``adapter_names`` gives it.

If the named adapters share a basis, each layer reads P and Q once and multiplies every row with its own core, also in
training. Otherwise each adapter computes its own rows. PEFT passes the names to the tuner but not to the model, so
forward hooks pass them to the layers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, quantization_extra_repr
from torch import Tensor, nn
from torch.nn.functional import linear

from frozencore.adapter.layer import FrozenCoreLayer, RowCores
from frozencore.calibration.preserve import refuse_rewritten
from frozencore.errors import ModelError
from frozencore.quiet import with_attributes

BASE_ROW = "__base__"  # PEFT's name for "no adapter"


@contextmanager
def adapter_of_each_row(model: nn.Module, names: Sequence[str], *, num_beams: int = 1) -> Iterator[None]:
    """Use the named adapters for the rows of every batch inside.

    Args:
        names: One adapter name, or ``"__base__"``, per row.
        num_beams: The number of copies of each row, behind the encoder if there is one.
    """
    layers = [m for m in model.modules() if isinstance(m, FrozenCoreLayer | AuxiliaryTrainingWrapper)]
    frozen = [layer for layer in layers if isinstance(layer, FrozenCoreLayer)]
    known = {name for layer in frozen for name in layer.frozencore_R}
    unknown = sorted(set(names) - known - {BASE_ROW})
    if unknown:
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. "
            f"The model has {', '.join(sorted(known))}, and {BASE_ROW} for the base model."
        )
    wanted = [name for name in dict.fromkeys(names) if name != BASE_ROW]
    kinds = [
        {
            (id(layer.frozencore_P[name]), id(layer.frozencore_Q[name]), layer.frozencore_scale[name])
            for name in wanted
            if name in layer.frozencore_R
        }
        for layer in frozen
    ]
    together = all(len(kinds_here) <= 1 for kinds_here in kinds)
    if model.training and (not together or len(layers) > len(frozen)):
        raise ValueError(
            "Cannot pass `adapter_names` in training mode unless all share a basis and train nothing but cores. "
            "Call model.eval() first, or load cores of one basis."
        )
    of_each_beam = [name for name in names for _ in range(num_beams)]
    in_encoder = {id(module) for module in encoder_modules(model)}
    with ExitStack() as undo:
        for layer in layers:
            names_here = list(names) if id(layer) in in_encoder else of_each_beam
            if together and isinstance(layer, FrozenCoreLayer):
                undo.enter_context(rows_through(layer, _row_cores(layer, wanted, names_here)))
            else:
                handle = layer.register_forward_pre_hook(_passes_names(layer, names_here), with_kwargs=True)
                undo.callback(handle.remove)
        yield


@contextmanager
def rows_through(layer: FrozenCoreLayer, rows: RowCores) -> Iterator[None]:
    """Use the rows' own cores in a layer, in place of its active adapters, for every batch inside."""
    layer.require_unmerged()
    with with_attributes(layer, row_cores=rows):  # an outer batch goes on with its own rows
        yield


def other_modules(model: nn.Module, own: Container[str]) -> list[FrozenCoreLayer | AuxiliaryTrainingWrapper]:
    """What other adapters change in a model: layers besides those named ``own``, and trained copies of modules."""
    return [
        module
        for module in model.modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        or (isinstance(module, FrozenCoreLayer) and module.name not in own)
    ]


@contextmanager
def base_rows(
    others: Iterable[FrozenCoreLayer | AuxiliaryTrainingWrapper], num_rows: Callable[[nn.Module], int]
) -> Iterator[None]:
    """Use the base model for every row in the modules of other adapters, whichever is active."""
    with ExitStack() as undo:
        for module in others:
            if isinstance(module, FrozenCoreLayer):
                undo.enter_context(rows_through(module, RowCores(None, torch.empty(num_rows(module), 0, 0))))
            else:
                undo.enter_context(with_attributes(module, _disable_adapters=True))
        yield


def _row_cores(layer: FrozenCoreLayer, wanted: Sequence[str], names: Sequence[str]) -> RowCores:
    """The core of each row; zeros for rows without an adapter in this layer."""
    here = [name for name in wanted if name in layer.frozencore_R]
    if not here:
        return RowCores(None, torch.empty(len(names), 0, 0))
    cores = [layer._trained_factors(name)[2] for name in here]
    slot: Mapping[str, int] = {name: i for i, name in enumerate(here, start=1)}
    slots = torch.tensor([slot.get(name, 0) for name in names], device=cores[0].device)
    transposed = torch.stack([torch.zeros_like(cores[0]), *(R.mT for R in cores)]).index_select(0, slots)
    return layer.row_cores_of(here[0], transposed.mT)


def _passes_names(layer: Any, names: list[str]) -> Any:
    """Make a hook that passes the names to a layer, except within a batch inside this one that has other rows."""
    outer = getattr(layer, "row_cores", None)

    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_own = getattr(layer, "row_cores", None) is outer
        return args, {**kwargs, "adapter_names": names} if is_own else kwargs

    return hook


def encoder_modules(model: Any) -> Iterator[nn.Module]:
    """The modules of an encoder that runs once, before beams repeat the rows."""
    base = getattr(model, "model", model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        yield from base.get_encoder().modules()


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
