"""The adapters on one linear layer: P (m x r) and Q (n x r) in the base layer's dtype, R (r x r) trained in float32.

P and Q are buffers. Until a basis is set they are zero, so the layer computes the same as its base layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils import resolve_quantization_backend
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.saved.basis import sample_weight
from frozencore.adapter.saved.state import UncalibratedWarning
from frozencore.adapter.shared_factors import SharedFactors
from frozencore.errors import ArtifactError, CalibrationError, ConfigError
from frozencore.maths.basis import Basis


@dataclass(frozen=True)
class RowCores:
    """The cores of a batch's rows in one layer.

    Attributes:
        basis: P, Q and s of all cores; None if no row has a core in this layer.
        R: rows x r x r, the core of each row; zeros for a row without a core. Its values may change between two calls
            of a compiled model. Rows of one token are fastest if the transposes are contiguous.
    """

    basis: tuple[Tensor, Tensor, float] | None
    R: Tensor


class FrozenCoreLayer(BaseTunerLayer):
    """State and arithmetic of the adapters on one base layer with n inputs and m outputs.

    ``frozencore_scale``: s. ``frozencore_ready``: whether a basis was set; None if that must be looked up.
    ``awaits_core``: adapters whose core is not loaded yet. ``warned``: adapters without a basis that a warning named,
    one set for all layers.
    """

    adapter_layer_names = ("frozencore_R",)
    other_param_names = ("frozencore_P", "frozencore_Q", "frozencore_scale", "frozencore_ready")

    def __init__(
        self,
        base_layer: nn.Module,
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
        self.base_layer = base_layer
        self.name = name
        self.model_dtype = dtype
        self.quantization_backend = resolve_quantization_backend(self.get_base_layer(), **kwargs)
        self.frozencore_P = SharedFactors()
        self.frozencore_Q = SharedFactors()
        self.frozencore_R = nn.ModuleDict()
        self.frozencore_scale: dict[str, float] = {}
        self.frozencore_ready: dict[str, bool | None] = {}
        self.warned = set() if warned is None else warned
        self.row_cores: RowCores | None = None
        self.awaits_core: set[str] = set()
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.out_features, self.in_features = layer_shape(self.get_base_layer())
        self._samples_at_first = sample_weight(getattr(self.get_base_layer(), "weight", None))
        self._original: tuple[Tensor, tuple[int, int]] | None = None  # while merged: the weight before; version since

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of the base layer: its outputs and inputs."""
        return self.out_features, self.in_features

    @property
    def base_samples(self) -> Tensor | None:
        """Some values of the weight without merged adapters; for a shard, those read when the layer was wrapped."""
        weight = self.get_base_layer().weight
        if self._original is not None and not self._was_changed(self._original[1]):
            weight = self._original[0]
        found = sample_weight(weight) if weight.numel() == self.out_features * self.in_features else None
        return self._samples_at_first if found is None else found

    def _weight_version(self) -> tuple[int, int]:
        """The base weight and its number of changes in place; setting its data, as merging does, is none."""
        weight = self.get_base_layer().weight
        return id(weight), version_of(weight)

    def _was_changed(self, since: tuple[int, int]) -> bool:
        """Whether the base weight was changed in place; a copy of it counts as unchanged."""
        now = self._weight_version()
        return now[0] == since[0] and now != since

    def core(self, adapter_name: str) -> Tensor:
        """The core that trains: R (r x r)."""
        linear: Any = self.frozencore_R[adapter_name]
        return linear.weight

    def factors(self, adapter_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """P (m x r), Q (n x r) and R (r x r) of an adapter."""
        return self.frozencore_P[adapter_name], self.frozencore_Q[adapter_name], self.core(adapter_name)

    def update_layer(self, adapter_name: str, rank: int, scale: float, *, inference_mode: bool) -> None:
        """Add an adapter without a basis: zero P, Q and R."""
        rank = min(rank, self.in_features, self.out_features)
        device, dtype = self._device_and_dtype()
        core = nn.Linear(rank, rank, bias=False, device="meta")  # a random initial value would advance the user's RNG
        core.weight = nn.Parameter(
            torch.zeros(rank, rank, device=device, dtype=torch.promote_types(dtype, torch.float32))
        )
        self.frozencore_R[adapter_name] = core
        self.frozencore_P[adapter_name] = torch.zeros(self.out_features, rank, device=device, dtype=dtype)
        self.frozencore_Q[adapter_name] = torch.zeros(self.in_features, rank, device=device, dtype=dtype)
        self.frozencore_scale[adapter_name] = scale
        self.frozencore_ready[adapter_name] = None
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def set_basis(
        self, adapter_name: str, basis: Basis, *, start_core: Tensor | None = None, random_core: bool = False
    ) -> None:
        """Fix P and Q, and reset the core to zero, to ``start_core``, or to random values."""
        R = self.core(adapter_name)
        self.require_fit(len(R), basis)
        with torch.no_grad():
            self.frozencore_P.fill(adapter_name, basis.P)
            self.frozencore_Q.fill(adapter_name, basis.Q)
            R.zero_()
            if random_core:
                nn.init.kaiming_uniform_(R, a=5**0.5)
            if start_core is not None:
                R.copy_(start_core)
        self.frozencore_ready[adapter_name] = True

    def share_basis(self, adapter_name: str, other: str, *, random_core: bool) -> None:
        """Let a new adapter use the P and Q of another adapter of the same shapes."""
        for factors in (self.frozencore_P, self.frozencore_Q):
            factors.join(adapter_name, other)
        if random_core:
            nn.init.kaiming_uniform_(self.core(adapter_name), a=5**0.5)

    def are_alike(self, adapter_name: str, other: str) -> bool:
        """Return whether two adapters have factors of the same kind, and the same scale."""
        kinds = [
            (self.frozencore_scale[name], *((X.shape, X.dtype, X.device) for X in self.factors(name)[:2]))
            for name in (adapter_name, other)
        ]
        return kinds[0] == kinds[1]

    def require_fit(self, rank: int, basis: Basis) -> None:
        """Raise an error if a basis does not have the shape of factors of this rank in this layer."""
        shapes = (self.out_features, rank), (self.in_features, rank)
        if (tuple(basis.P.shape), tuple(basis.Q.shape)) != shapes:
            raise CalibrationError(
                f"Layer {self.name!r} holds factors of shapes {shapes[0]} and {shapes[1]}, but a basis of "
                f"shapes {tuple(basis.P.shape)} and {tuple(basis.Q.shape)} came. "
                "Use the rank of the adapter, and moments of this layer."
            )

    def row_cores_of(self, adapter_name: str, R: Tensor) -> RowCores:
        """Put cores (rows x r x r) on an adapter's basis."""
        P, Q, _ = self._trained_factors(adapter_name)
        return RowCores((P, Q, self.frozencore_scale[adapter_name]), R)

    def require_unmerged(self) -> None:
        """Refuse rows with adapters of their own while an adapter is merged: each row would get its update."""
        if self.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
            )

    def dense_weight(self) -> Tensor:
        """W as m x n in floating point: dequantised if needed, Conv1D transposed. The stored weight is not changed."""
        weight = self.get_base_weight()
        return weight.mT if isinstance(self.get_base_layer(), Conv1D) else weight

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """``s·P R Qᵀ`` in the layout of the base weight, computed in float32."""
        P, Q, R = self.factors(adapter_name)
        delta = (P.to(R.dtype) @ R @ Q.to(R.dtype).mT) * self.frozencore_scale[adapter_name]
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
                    self._set_aside()
                self._add_to_weight(adapter_name, 1.0, check=safe_merge)
                self.merged_adapters.append(adapter_name)

    def unmerge(self) -> None:
        """Restore the original weight exactly; a weight that was changed in place since loses the updates instead."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        original, self._original = self._original, None
        weight = self.get_base_layer().weight
        if original is not None and not self._was_changed(original[1]):
            weight.data = original[0].to(weight.device, weight.dtype)
            self.merged_adapters.clear()
        while self.merged_adapters:
            self._add_to_weight(self.merged_adapters.pop(), -1.0, check=False)

    def _set_aside(self) -> None:
        """Keep the weight: subtracting a rounded sum would not restore it."""
        self._original = self.get_base_layer().weight.data, self._weight_version()

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True

    def _add_to_weight(self, adapter_name: str, sign: float, *, check: bool) -> None:
        weight = self.get_base_weight()
        merged = (weight.to(torch.promote_types(weight.dtype, torch.float32))) + sign * self.get_delta_weight(
            adapter_name
        ).to(weight.device)
        if check and not torch.isfinite(merged).all():
            raise ValueError(f"NaNs detected in the merged weights. The adapter {adapter_name} seems to be broken")
        self.set_base_weight(merged.to(weight.dtype))

    def _trained_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, Tensor]:
        if adapter_name in self.awaits_core:
            raise ArtifactError(
                f"The cores of the adapter {adapter_name!r} were not loaded: its file holds cores without bases, which "
                "this loader cannot read. Use PeftModel.from_pretrained, or `frozencore adapter unpack` the folder."
            )
        if not self.frozencore_ready[adapter_name]:
            self._look_for_basis(adapter_name)
        return self.factors(adapter_name)

    @torch.compiler.assume_constant_result  # a compiled graph cannot read values
    def _look_for_basis(self, adapter_name: str) -> None:
        """Raise an error if a basis that is zero is trained on; warn once if a core that is not zero is used on it."""
        P, _, R = self.factors(adapter_name)
        if P.is_meta or R.is_meta:
            return
        if self.training:
            self.require_basis(adapter_name)
        self.frozencore_ready[adapter_name] = bool(P.any())
        if not P.any() and bool(R.any()) and adapter_name not in self.warned:
            self.warned.add(adapter_name)
            warnings.warn(
                f"A core works on the basis that it was trained on, but the adapter {adapter_name!r} has a trained "
                "core and no basis, so it acts as the base model. Load the whole adapter, or give it its basis with "
                "frozencore.set_bases(model, bases) and load the core again.",
                UncalibratedWarning,
                stacklevel=2,
            )

    def require_basis(self, adapter_name: str) -> None:
        """Raise an error if the basis is zero: it was never set and cannot be trained on."""
        if not bool(self.frozencore_P[adapter_name].any()):
            raise CalibrationError(
                f"A frozen core needs a basis before training, but layer {self.name!r} of adapter {adapter_name!r} "
                "has none. Call frozencore.calibrate(model, dataloader) first."
            )
        self.frozencore_ready[adapter_name] = True

    def set_core_dtype(self, adapter_name: str, *, widened: bool) -> None:
        """Cast cores to float32 (float64 on a float64 base), or to the base layer's dtype."""
        _, dtype = self._device_and_dtype()
        kept = torch.promote_types(dtype, torch.float32) if widened else dtype
        self.frozencore_R[adapter_name].to(kept)

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

    def make_room_for(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Prepare to load this layer's part of a model's state dict, in which each basis may stand once."""
        cores = [name for name in self.frozencore_R if f"{prefix}frozencore_R.{name}.weight" in state_dict]
        for side, factors in (("P", self.frozencore_P), ("Q", self.frozencore_Q)):
            came = [name for name in factors if f"{prefix}frozencore_{side}.{name}" in state_dict]
            factors.make_room(came, cores)

    def look_again(self) -> None:
        """After tensors were loaded: share equal bases, and look whether there is a basis."""
        for name in reversed(list(self.frozencore_R)):  # a later adapter joins an earlier one, as when it was added
            self.frozencore_P.share(name)
            self.frozencore_Q.share(name)
            P = self.frozencore_P[name]
            self.frozencore_ready[name] = None if P.is_meta or not P.any() else True

    def _device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        device, dtype = self._get_base_layer_device_and_dtype(self.get_base_layer())
        usable = dtype if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else self.model_dtype
        return device if device is not None else torch.device("cpu"), usable


def version_of(tensor: Tensor) -> int:
    """The number of changes of a tensor in place; 0 for an inference tensor, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def layer_shape(layer: Any) -> tuple[int, int]:
    """(m, n): outputs and inputs of a linear layer."""
    return (layer.nf, layer.nx) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, quantised or not, but not an adapter layer of ours."""
    quantised = isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features")
    return isinstance(module, nn.Linear | Conv1D) or (quantised and not isinstance(module, BaseTunerLayer))


def frozen_core_layers(model: nn.Module, adapter_name: str) -> dict[str, FrozenCoreLayer]:
    """The layers that have an adapter, by their name in the base model."""
    layers = (module for module in model.modules() if isinstance(module, FrozenCoreLayer))
    return {layer.name: layer for layer in layers if adapter_name in layer.frozencore_R}


def require_own_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that the active frozen-core adapters train; refuses frozen cores and other trained parameters."""
    cores: list[Tensor] = []
    named: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, FrozenCoreLayer):
            cores += [module.core(name) for name in module.active_adapters if name in module.frozencore_R]
        elif isinstance(module, AuxiliaryTrainingWrapper):
            parameters = module.named_parameters()
            named += [p for name, p in parameters if not set(name.split(".")).isdisjoint(module.active_adapters)]
    if not cores:
        return []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    frozen = [names[id(core)] for core in cores if not core.requires_grad]
    if frozen:
        raise ConfigError(
            f"Every core of an active adapter trains, but {frozen[0]!r} is frozen ({len(frozen)} of {len(cores)}). "
            "Call set_adapter(name) on the model, or load the adapter with is_trainable=True."
        )
    own = {id(parameter) for parameter in [*cores, *named]}
    foreign = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in own]
    if foreign:
        raise ConfigError(
            f"A frozen-core adapter trains its cores, {sum(core.numel() for core in cores):,} values, but "
            f"{names[id(foreign[0])]!r} trains as well ({len(foreign)} parameters of "
            f"{sum(p.numel() for p in foreign):,} values in all). Freeze it with requires_grad_(False), or name its "
            "module in modules_to_save."
        )
    return [parameter for parameter in [*cores, *named] if parameter.requires_grad]


def require_float32(model: nn.Module) -> None:
    """Refuse a model without trainable parameters, or with some that are not float32."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("Training needs trainable parameters, but this model has none. Add an adapter first.")
    for name, parameter in trainable.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"Trainable parameters must be float32 (the frozen ones need not be), but {name!r} is "
                f"{parameter.dtype}. Add the adapter with autocast_adapter_dtype=True, or load the model in float32."
            )
