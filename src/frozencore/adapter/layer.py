"""A linear layer with frozen cores, plain or quantised: ``y = W x + b + s·P R Qᵀ x``.

P (m x r) and Q (n x r) are buffers in the base layer's dtype; R (r x r) is trained in float32. Until a basis is set P
and Q are zero, so the layer computes the same as its base layer. The base layer and R are called as modules, so that
hooks, FSDP and Opacus see them. Between them stand two products:

    z = x Q,    u = R(z),    y = W x + b + s·u Pᵀ

For the backward pass autograd keeps z, r values a token in the dtype of R.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from accelerate.utils import align_module_device
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge, onload_layer
from peft.utils import TrainableTokensWrapper, quantization_extra_repr, resolve_quantization_backend
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.base_record import sample_weight
from frozencore.adapter.basis import layer_digest, require_set
from frozencore.adapter.core_product import CorePart, PerRowCores, plus_core, require_batch_axis
from frozencore.adapter.shared_factors import SharedFactors
from frozencore.device import execution_device, without_autocast
from frozencore.errors import ModelError
from frozencore.maths.basis import LayerBasis, known_basis

PREFIX = "frozencore_"
"""The prefix of the names of our tensors, after the name of their layer."""


class BasisState(Enum):
    """The state of an adapter's basis in a layer: unknown until the next forward pass looks, absent (zero), or set."""

    UNKNOWN = "unknown"
    ABSENT = "absent"
    READY = "ready"


class BasisMark(NamedTuple):
    """The id of the basis in a layer, and a hash and version of P and Q, which show whether they were changed since.

    Attributes:
        digest: The hash of P, Q and s in the dtype of the model.
        version: Values that differ once P, Q or s was replaced or changed in place; None until a file is loaded.
    """

    basis_id: str
    digest: str
    version: tuple[object, ...] | None


class UncalibratedWarning(UserWarning):
    """Warning: an adapter that was never calibrated is saved, loaded or merged."""


def warn_of_uncalibrated(what: str, then: str) -> None:
    """Warn of an adapter whose bases are zero, so that it changes nothing.

    Args:
        what: The adapter, as the beginning of a sentence.
        then: The step that follows calibration.
    """
    zero = "its bases are zero and it changes nothing. Call frozencore.calibrate(model, dataloader)"
    warnings.warn(f"{what} was never calibrated: {zero} {then}.", UncalibratedWarning, stacklevel=4)


def stored_layer(module: Any) -> Any:
    """The base model's layer below PEFT's wrappers: of an adapter, and of trained tokens."""
    layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return layer.token_adapter.get_base_layer() if isinstance(layer, TrainableTokensWrapper) else layer


class FrozenCoreLinear(nn.Module, BaseTunerLayer):
    """Frozen cores on ``nn.Linear`` or ``Conv1D`` with n inputs and m outputs.

    ``frozencore_scale``: s. ``frozencore_state``: see :class:`BasisState`. ``frozencore_mark``: see
    :class:`BasisMark`. ``warned``: adapters without a basis that a warning named, one set for all layers.

    >>> layer = FrozenCoreLinear(nn.Linear(4, 3), "default", "its name in the model")
    >>> layer.update_layer("default", 2, 1.0, inference_mode=False)
    >>> [tuple(factor.shape) for factor in layer.factors("default")]
    [(3, 2), (4, 2), (2, 2)]
    """

    adapter_layer_names = ("frozencore_R",)
    other_param_names = (
        "frozencore_P", "frozencore_Q", "frozencore_scale", "frozencore_state", "frozencore_mark",
    )  # fmt: skip

    # PEFT's, which a type checker would take for submodules
    active_adapters: Any
    get_base_layer: Callable[[], Any]
    get_base_weight: Callable[[], Tensor]
    set_base_weight: Callable[[Tensor], None]
    set_adapter: Callable[..., None]
    _cast_input_dtype: Callable[[Tensor, torch.dtype], Tensor]
    _get_base_layer_device_and_dtype: Callable[[nn.Module], Any]

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        warned: set[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            dtype: The model's dtype, for a quantised weight that does not show its dtype of computation.
        """
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self.model_dtype = dtype
        self.quantization_backend = resolve_quantization_backend(self.get_base_layer(), **kwargs)
        self.frozencore_P = SharedFactors()
        self.frozencore_Q = SharedFactors()
        self.frozencore_R = nn.ModuleDict()
        self.frozencore_scale: dict[str, float] = {}
        self.frozencore_state: dict[str, BasisState] = {}
        self.frozencore_mark: dict[str, BasisMark] = {}
        self.warned = set() if warned is None else warned
        self.per_row: PerRowCores | None = None  # in place of the active adapters
        self.has_batch_axis: bool | None = None  # whether the first axis of its input is the batch; None: not known yet
        self._active_adapter = adapter_name
        self._disable_adapters = False
        self.cast_input_dtype_enabled = True  # peft.helpers.disable_input_dtype_casting sets it
        self.merged_adapters: list[str] = []
        self.out_features, self.in_features = layer_shape(self.get_base_layer())
        self._samples_at_first = sample_weight(getattr(self.stored_layer, "weight", None))
        self._before_merge: Any = None  # while merged: the original weight, or the quantised layer with it
        self._updates: list[tuple[Tensor, Tensor, Tensor, float]] = []  # while merged: P, Q, R and s of each
        self.register_load_state_dict_post_hook(FrozenCoreLinear._refresh_state)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of the base layer: its outputs and inputs."""
        return self.out_features, self.in_features

    def core(self, adapter_name: str) -> Tensor:
        """The core that trains: R (r x r)."""
        module: Any = self.frozencore_R[adapter_name]
        return module.weight

    def require_plain_core(self, adapter_name: str) -> None:
        """Refuse a core that was pruned or parametrised."""
        if "weight" not in self.frozencore_R[adapter_name]._parameters:
            raise ModelError(
                f"A core is read and replaced as one parameter, but that of layer {self.name!r} is computed from other "
                "tensors. Call torch.nn.utils.prune.remove or parametrize.remove_parametrizations on it first."
            )

    def stored_core(self, adapter_name: str) -> Tensor:
        """R, to be read or replaced in memory; refuses a core whose values are elsewhere."""
        self.require_plain_core(adapter_name)
        R = self.core(adapter_name)
        if R.is_meta and hasattr(self.frozencore_R[adapter_name], "_hf_hook"):  # else a file will bring its values
            raise ModelError(
                f"A core is read and replaced in memory, but accelerate offloaded that of layer {self.name!r}. Do it "
                "before the model is offloaded, or call accelerate.hooks.remove_hook_from_submodules(model) first."
            )
        return R

    def factors(self, adapter_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """P (m x r), Q (n x r) and R (r x r) of an adapter."""
        return self.frozencore_P[adapter_name], self.frozencore_Q[adapter_name], self.core(adapter_name)

    def basis(self, adapter_name: str) -> LayerBasis:
        """P, Q and s of an adapter."""
        P, Q = self.frozencore_P[adapter_name], self.frozencore_Q[adapter_name]
        return known_basis(P, Q, self.frozencore_scale[adapter_name])

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            if self.disable_adapters and self.merged:
                with onload_layer(self):
                    self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        y, rows = self.base_layer(x, *args, **kwargs), self.per_row
        if rows is None:
            for adapter_name in self.active_adapters:
                if adapter_name in self.frozencore_R:
                    P, Q, _ = self.trained_factors(adapter_name)
                    core: Any = self.frozencore_R[adapter_name]
                    y = self._plus(y, x, P, Q, core, self.frozencore_scale[adapter_name])
            return y
        if not torch.compiler.is_compiling():  # compiled code cannot ask for its thread
            rows.require_owner(self.name)
        if rows.parts:
            require_batch_axis(self, self.name)
        if rows.num_rows and self.has_batch_axis and len(x) != rows.num_rows:
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{rows.num_rows} and {len(x)} respectively. Each row must be one input of layer {self.name!r}; where "
                "`generate` repeats rows (num_beams, num_return_sequences), say so: CoreBank.rows(names, num_beams=)."
            )
        for part in rows.parts:
            if part.rows is None:
                y = self._plus(y, x, part.P, part.Q, part.R, part.scale)
            else:
                here = part.rows
                y = y.index_copy(0, here, self._plus(y[here], x[here], part.P, part.Q, part.R, part.scale))
        return y

    def _plus(self, y: Tensor, x: Tensor, P: Tensor, Q: Tensor, R: nn.Linear | Tensor, scale: float) -> Tensor:
        return plus_core(y, self._cast_input_dtype(x, Q.dtype), P, Q, R, scale)

    def per_row_cores(self, adapter_name: str, R: Tensor) -> PerRowCores:
        """Put cores (rows x r x r) on an adapter's basis."""
        P, Q, _ = self.trained_factors(adapter_name)
        return PerRowCores((CorePart(P, Q, R, self.frozencore_scale[adapter_name]),))

    def trained_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """P, Q and R for a forward pass; refuses training on a basis of zeros."""
        if self.frozencore_state[adapter_name] is not BasisState.READY:
            self._look_for_basis(adapter_name)
        return self.factors(adapter_name)

    @torch.compiler.assume_constant_result  # a compiled graph cannot read values
    def _look_for_basis(self, adapter_name: str) -> None:
        """Refuse training on a basis of zeros; warn once if a core that is not zero is used on one."""
        P, _, R = self.factors(adapter_name)
        if P.is_meta or R.is_meta:
            return
        basis = self.basis(adapter_name)
        if self.training:
            require_set({self.name: basis})
        has_basis = basis.is_set
        self.frozencore_state[adapter_name] = BasisState.READY if has_basis else BasisState.ABSENT
        if not has_basis and bool(R.any()) and adapter_name not in self.warned:
            self.warned.add(adapter_name)
            warnings.warn(
                f"A core works on the basis that it was trained on, but the adapter {adapter_name!r} has a trained "
                "core and no basis, so it acts as the base model. Load the whole adapter, or give it its basis with "
                "frozencore.set_basis(model, basis) and load the core again.",
                UncalibratedWarning,
                stacklevel=2,
            )

    def update_layer(self, adapter_name: str, rank: int, scale: float, *, inference_mode: bool) -> None:
        """Add an adapter without a basis: zero P, Q and R."""
        rank = min(rank, self.in_features, self.out_features)
        device, dtype = self._device_and_dtype()
        core = nn.Linear(rank, rank, bias=False, device="meta")  # a random initial value would advance the user's RNG
        wide = torch.promote_types(dtype, torch.float32)
        core.weight = nn.Parameter(torch.zeros(rank, rank, device=device, dtype=wide))
        self.frozencore_R[adapter_name] = core
        self.frozencore_P[adapter_name] = torch.zeros(self.out_features, rank, device=device, dtype=dtype)
        self.frozencore_Q[adapter_name] = torch.zeros(self.in_features, rank, device=device, dtype=dtype)
        self.frozencore_scale[adapter_name] = scale
        self.frozencore_state[adapter_name] = BasisState.UNKNOWN
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def fill_core(self, adapter_name: str) -> None:
        """Replace a core on the meta device by zeros, where no file will bring values after ``low_cpu_mem_usage``."""
        P, _, R = self.factors(adapter_name)
        if R.is_meta and not P.is_meta:
            zeros = nn.Parameter(torch.zeros(R.shape, device=P.device, dtype=R.dtype), requires_grad=R.requires_grad)
            # PEFT still sends every parameter that is registered to the meta device here
            self.frozencore_R[adapter_name]._parameters["weight"] = zeros

    def set_basis(
        self, adapter_name: str, basis: LayerBasis, *, start_core: Tensor | None = None, random_core: bool = False
    ) -> None:
        """Fix P and Q, and reset the core to zero, to ``start_core``, or to random values."""
        self.fill_core(adapter_name)
        R = self.core(adapter_name)
        with torch.no_grad():
            self.frozencore_P.fill(adapter_name, basis.P)
            self.frozencore_Q.fill(adapter_name, basis.Q)
            R.zero_()
            if random_core:
                nn.init.kaiming_uniform_(R, a=5**0.5)
            if start_core is not None:
                R.copy_(start_core)
        self.frozencore_state[adapter_name] = BasisState.READY

    def share_basis(self, adapter_name: str, other: str, *, random_core: bool) -> None:
        """Let a new adapter use the P and Q of another adapter of the same shapes."""
        for factors in (self.frozencore_P, self.frozencore_Q):
            factors.join(adapter_name, other)
        if other in self.frozencore_mark:
            self.frozencore_mark[adapter_name] = self.frozencore_mark[other]
        if random_core:
            nn.init.kaiming_uniform_(self.core(adapter_name), a=5**0.5)

    def attach_basis_id(
        self, adapter_name: str, basis_id: str, digest: str, *, will_load: LayerBasis | None = None
    ) -> None:
        """Remember the id of the basis that P and Q are of.

        Args:
            digest: The hash of P, Q and s in the basis.
            will_load: P and Q that the model's state dict is about to bring.
        """
        here = self.basis(adapter_name)
        if here.P.dtype == torch.float16:  # which rounds in other places than bfloat16
            rounded = here if will_load is None else replace(will_load, P=will_load.P.half(), Q=will_load.Q.half())
            digest = layer_digest(rounded)
        version = self._basis_version(adapter_name) if will_load is None else None
        self.frozencore_mark[adapter_name] = BasisMark(basis_id, digest, version)

    def current_basis_id(self, adapter_name: str, *, by_hash: bool = False) -> str | None:
        """The id of the basis that P and Q are of; None if they have none, or were changed since.

        Args:
            by_hash: Compare their values too: a change through ``P.data`` leaves the version as it was.
        """
        mark = self.frozencore_mark.get(adapter_name)
        if mark is None:
            return None
        version = self._basis_version(adapter_name)
        if by_hash or mark.version != version or self.frozencore_P[adapter_name].is_inference():
            if mark.digest != layer_digest(self.basis(adapter_name)):
                return None
            self.frozencore_mark[adapter_name] = mark._replace(version=version)
        return mark.basis_id

    def _basis_version(self, adapter_name: str) -> tuple[object, ...]:
        """Values that differ once P, Q or s was replaced or changed in place; inference tensors count no changes."""
        P, Q = self.frozencore_P[adapter_name], self.frozencore_Q[adapter_name]
        versions = (0, 0) if P.is_inference() or Q.is_inference() else (P._version, Q._version)
        return id(P), id(Q), P.data_ptr(), Q.data_ptr(), *versions, self.frozencore_scale[adapter_name]

    @property
    def stored_layer(self) -> Any:
        """The base model's layer: below the wrapper that adds trained tokens to a head tied to their embedding."""
        return stored_layer(self)

    @property
    def base_samples(self) -> Tensor | None:
        """Some values of the weight without merged adapters; for a shard, as they were when the layer was wrapped."""
        weight = self._original_weight() if self.merged and self._is_as_merged() else self.stored_layer.weight
        samples = sample_weight(weight) if weight.numel() == self.out_features * self.in_features else None
        return self._samples_at_first if samples is None else samples

    def dense_weight(self) -> Tensor:
        """W as m x n in floating point: dequantised if needed, Conv1D transposed. The stored weight is not changed."""
        with align_module_device(self.get_base_layer()):  # loads an offloaded weight
            weight = self.get_base_weight()
        return weight.mT if isinstance(self.get_base_layer(), Conv1D) else weight

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """``s·P R Qᵀ`` in the layout of the base weight, computed in float32."""
        return self._update(*self.factors(adapter_name), self.frozencore_scale[adapter_name])

    @without_autocast()
    def _update(self, P: Tensor, Q: Tensor, R: Tensor, scale: float) -> Tensor:
        delta = (P.to(R.dtype) @ R @ Q.to(R.dtype).mT) * scale
        return delta.mT if isinstance(self.get_base_layer(), Conv1D) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters' updates into the base weight.

        The original weight is kept until :meth:`unmerge`, so a merged layer takes the memory of its weight once more.

        Args:
            safe_merge: Check the result for NaN and Inf before it replaces the weight.
        """
        for adapter_name in check_adapters_to_merge(self, adapter_names):
            if adapter_name in self.frozencore_R:
                if not self.merged:
                    self._backup_weight()
                P, Q, R = (factor.detach().clone() for factor in self.factors(adapter_name))
                merged = self._sum(self.get_base_weight(), update := (P, Q, R, self.frozencore_scale[adapter_name]))
                if safe_merge and not torch.isfinite(merged).all():
                    raise ValueError(
                        f"NaNs detected in the merged weights. The adapter {adapter_name} seems to be broken"
                    )
                self.set_base_weight(merged)
                self._updates.append(update)
                self.merged_adapters.append(adapter_name)

    def unmerge(self) -> None:
        """Restore the original weight bit by bit; subtracting a rounded sum would not.

        Raises:
            ModelError: The weight is not the original plus the updates: it was loaded or changed since.
        """
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        if not self._is_as_merged():
            raise ModelError(
                f"Unmerging puts back the weight from before merging, but that of layer {self.name!r} was loaded or "
                "changed since, and that would be lost. Load or change base weights while no adapter is merged."
            )
        self._restore_weight()
        self._before_merge = None
        self._updates.clear()
        self.merged_adapters.clear()

    def _backup_weight(self) -> None:
        """Keep the original weight."""
        self._before_merge = self.get_base_layer().weight.data

    def _original_weight(self) -> Tensor:
        weight: Tensor = self._before_merge
        return weight

    def _restore_weight(self) -> None:
        weight = self.get_base_layer().weight
        weight.data = self._before_merge.to(weight.device, weight.dtype)

    def _is_as_merged(self) -> bool:
        """Whether the weight is the original plus the updates, computed again; a cast or moved one is too."""
        merged = self._before_merge
        for update in self._updates:
            merged = self._sum(merged, update)
        weight = self.get_base_layer().weight.data
        return have_same_bits(merged.to(weight.device, weight.dtype), weight)

    def _sum(self, weight: Tensor, update: tuple[Tensor, Tensor, Tensor, float]) -> Tensor:
        delta = self._update(*update).to(weight.device)
        return (weight.to(torch.promote_types(weight.dtype, torch.float32)) + delta).to(weight.dtype)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True

    def set_core_dtype(self, adapter_name: str, *, widened: bool) -> None:
        """Cast cores to float32 (float64 on a float64 base), or to the base layer's dtype."""
        _, dtype = self._device_and_dtype()
        self.frozencore_R[adapter_name].to(torch.promote_types(dtype, torch.float32) if widened else dtype)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter; PEFT's method would round R to the base layer's dtype with ``low_cpu_mem_usage``."""
        P, Q, R = self.factors(adapter_name)
        if P.is_meta or Q.is_meta or R.is_meta:
            return
        own_device, dtype = self._device_and_dtype()
        target = own_device if device is None else device
        for factors, X in ((self.frozencore_P, P), (self.frozencore_Q, Q)):
            if (moved := X.to(target, dtype)) is not X:
                factors[adapter_name] = moved
                factors.share(adapter_name)
        self.frozencore_R[adapter_name].to(target)

    def _device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        device, dtype = self._get_base_layer_device_and_dtype(self.get_base_layer())
        usable = dtype if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else self.model_dtype
        if device is not None and device.type == "meta":
            device = execution_device(self.get_base_layer())
        return device if device is not None else torch.device("cpu"), usable

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load this layer's part of a model's state dict, in which each basis may stand once."""
        cores = [name for name in self.frozencore_R if f"{prefix}frozencore_R.{name}.weight" in state_dict]
        for side, factors in (("P", self.frozencore_P), ("Q", self.frozencore_Q)):
            loaded = [name for name in factors if f"{prefix}frozencore_{side}.{name}" in state_dict]
            factors.split_shared(loaded, cores)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _refresh_state(self, _: Any) -> None:
        """After tensors were loaded: share equal bases, and look whether there is a basis."""
        for name in reversed(list(self.frozencore_R)):  # a later adapter joins an earlier one, as when it was added
            self.frozencore_P.share(name)
            self.frozencore_Q.share(name)
            basis = self.basis(name)
            self.frozencore_state[name] = BasisState.READY if basis.is_set else BasisState.UNKNOWN
            mark = self.frozencore_mark.get(name)
            if mark is not None and mark.version is None and not basis.P.is_meta:
                self.frozencore_mark[name] = mark._replace(version=self._basis_version(name))

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def __repr__(self) -> str:
        return "frozencore." + super().__repr__()


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN included."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return torch.equal(one.view(integer), other.view(integer))


def layer_shape(layer: Any) -> tuple[int, int]:
    """(m, n): outputs and inputs of a linear layer."""
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, quantised or not, but not an adapter layer of ours.

    >>> is_linear(nn.Linear(4, 3)), is_linear(nn.Embedding(4, 3))
    (True, False)
    """
    quantised = isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features")
    return isinstance(module, nn.Linear | Conv1D) or (quantised and not isinstance(module, BaseTunerLayer))
