"""The PEFT tuner that puts frozen cores on a model's linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import (
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
    AuxiliaryTrainingWrapper,
    get_quantization_kwargs,
    resolve_quantization_backend,
)
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.config import FrozenCoreConfig, FrozenCoreType
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.adapter.linear import FrozenCoreLinear
from frozencore.adapter.mixed_batch import adapter_of_each_row
from frozencore.adapter.quantised_linear import FrozenCoreQuantisedLinear
from frozencore.adapter.seal.factors import BASE, PREFIX, Factors
from frozencore.adapter.seal.flat_cores import FLAT, flatten_cores, with_factors
from frozencore.adapter.seal.integrity import (
    require_finite,
    require_fit,
    require_sealed,
    require_sound,
    require_sound_cores,
)
from frozencore.adapter.seal.same_base import differing_layer, record_base
from frozencore.adapter.seal.saved_basis import SavedBasis
from frozencore.calibration.quantised import keep_weights
from frozencore.calibration.shards import require_same_bases
from frozencore.constructors import LayerEvidence, build_basis
from frozencore.errors import ArtifactError, ModelError
from frozencore.maths.basis import known_basis

ATTENTION_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "out_proj"]


class FrozenCoreModel(BaseTuner):
    """Frozen cores on a base model; made by ``peft.get_peft_model(base, FrozenCoreConfig(...))``."""

    prefix = PREFIX
    tuner_layer_cls = FrozenCoreLayer
    # The paper adapts every attention projection, where LoRA's default is q and v.
    target_module_mapping = {  # noqa: RUF012 - PEFT reads it from the class
        model_type: ATTENTION_PROJECTIONS if {"q_proj", "v_proj"} <= set(targets) else targets
        for model_type, targets in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.items()
    }

    _add_modules_to_save_to_tie = LoraModel._add_modules_to_save_to_tie  # it speaks of embeddings, not of LoRA

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT does; refuses a saved adapter of other weights, and says once which layers are too narrow.

        Raises:
            ArtifactError: The adapter was made on another base model, unless its configuration allows that.
        """
        keep_weights(model)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        layers = frozen_core_layers(model, adapter_name)
        config = self.peft_config[adapter_name]
        if config.basis_id is None:
            self._require_same_base(config, adapter_name, layers, (config.seal or {}).get("base"))
        else:
            self._lay_basis(config, adapter_name, layers)
        narrow = [name for name, layer in layers.items() if layer.rank(adapter_name) < _rank_of(config, name)]
        if narrow and not config.load_bases:
            warnings.warn(
                f"{len(narrow)} of {len(layers)} layers are narrower than the rank and got the rank that fits (first: "
                f"{narrow[0]}, {layers[narrow[0]].rank(adapter_name)} instead of {_rank_of(config, narrow[0])}).",
                stacklevel=2,
            )

    def _create_and_replace(
        self,
        peft_config: FrozenCoreConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        rank = _rank_of(peft_config, current_key)
        layer = target if isinstance(target, FrozenCoreLayer) else self._new_layer(target, adapter_name, current_key)
        layer.update_layer(
            adapter_name, rank, scale_of(peft_config, current_key), inference_mode=peft_config.inference_mode
        )
        if layer is not target:
            if adapter_name not in self.active_adapters:
                layer.requires_grad_(False)
            self._replace_module(parent, target_name, layer, target)
        if not peft_config.needs_calibration and not peft_config.load_bases and peft_config.basis_id is None:
            self._build_from_weight(layer, adapter_name, peft_config)

    def _new_layer(self, target: nn.Module, adapter_name: str, name: str) -> FrozenCoreLinear:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        backend = resolve_quantization_backend(base, **get_quantization_kwargs(self))
        is_linear = isinstance(base, nn.Linear | Conv1D) or (backend is not None and backend.layer_type == "linear")
        if not is_linear:
            raise ModelError(
                f"A frozen core sits on a linear layer, but target {name!r} is a {type(base).__name__}. "
                "Name linear layers in target_modules; fused experts, embeddings and convolutions are not supported."
            )
        dtype = getattr(self.model, "dtype", torch.float32)
        kind = FrozenCoreLinear if backend is None else FrozenCoreQuantisedLinear
        return kind(target, adapter_name, name, dtype=dtype, **get_quantization_kwargs(self))

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """As PEFT's, which on unloading would assign the computed weights of trainable tokens to their embedding."""
        if isinstance(child, AuxiliaryTrainingWrapper):
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def _lay_basis(self, config: FrozenCoreConfig, adapter_name: str, layers: dict[str, FrozenCoreLayer]) -> None:
        """P and Q of the named basis: those of an adapter in this model that has it, or from its folder."""
        origin = f"the adapter {adapter_name!r}"
        try:
            bases = self._held_basis(config, adapter_name)
            if bases is None:
                basis = config.find_basis(origin)
                require_basis_fits(origin, basis, config, layers, adapter_name)
                bases = basis.layers
            elif bases.keys() != layers.keys():
                raise ArtifactError(f"The basis of {origin} has other layers than its target_modules. Save it again.")
        except ArtifactError:
            self._take_back(adapter_name)
            raise
        for name, layer in layers.items():
            if not layer.frozencore_P[adapter_name].is_meta:
                layer.set_basis(adapter_name, known_basis(*bases[name]), random_core=not config.init_weights)
            layer.awaits_core.update([adapter_name] if config.load_bases else [])

    def _held_basis(self, config: FrozenCoreConfig, adapter_name: str) -> dict[str, tuple[Tensor, Tensor]] | None:
        for other, theirs in self.peft_config.items():
            if other != adapter_name and theirs.basis_id == config.basis_id:
                held = frozen_core_layers(self, other)
                bases = {name: layer.factors(other)[:2] for name, layer in held.items()}
                if all(not P.is_meta and not Q.is_meta for P, Q in bases.values()):
                    return bases
        return None

    def _take_back(self, adapter_name: str) -> None:
        """The model as it was before an adapter came that does not fit."""
        if len(self.peft_config) == 1:
            self.unload()
        else:
            self.delete_adapter(adapter_name)

    def _require_same_base(
        self, config: FrozenCoreConfig, adapter_name: str, layers: dict[str, FrozenCoreLayer], recorded: Any
    ) -> None:
        if recorded is None or not config.load_bases or config.allow_other_base:
            return
        odd = differing_layer(recorded, {name: layer.base_samples for name, layer in layers.items()})
        if odd is not None:
            self._take_back(adapter_name)
            raise _other_base("The adapter", odd)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor], **kwargs: Any
    ) -> dict[str, Tensor]:
        """As PEFT does, for saving; refuses NaN and Inf before a file is touched, and notes what the seal says.

        Raises:
            ArtifactError: A factor, or a module that is saved with them, is not finite.
        """
        found = super()._get_adapter_state_dict(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict, **kwargs
        )
        if config.basis_id is not None:
            found = {FLAT: flatten_cores(_cores_in(found))}
        modules = {key: value for key, value in state_dict.items() if f".modules_to_save.{adapter_name}." in key}
        plain = {key: value for key, value in (found | modules).items() if not value.is_meta}
        require_finite(f"the adapter {adapter_name!r}", plain, "It is not saved. Lower the learning rate.")
        if len(plain) == len(found | modules):
            layers = frozen_core_layers(model, adapter_name)
            samples = {name: layer.base_samples for name, layer in layers.items()}
            config.prepare_seal(found, record_base(samples) if config.basis_id is None else None)
        return found

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """As PEFT does, for loading; the tensors are checked before one of them reaches the model.

        Raises:
            ArtifactError: They are not sound, not those that were saved, or do not fit the model.
        """
        origin, layers = f"the adapter {adapter_name!r}", frozen_core_layers(model, adapter_name)
        own = {name: layer.factors(adapter_name) for name, layer in layers.items()}
        seal = config.take_seal()
        if FLAT in state_dict:
            require_sound_cores(origin, state_dict, config.basis_id)
            require_sealed(origin, seal, state_dict)
            on_meta = any(P.is_meta or Q.is_meta for P, Q, _ in own.values())
            bases = config.find_basis(origin).layers if on_meta else {name: own[name][:2] for name in own}
            state_dict = with_factors(origin, state_dict, bases)
        else:
            require_sealed(origin, seal, state_dict)
        factors = require_sound(origin, state_dict, config.coordinates)
        require_fit(origin, own, factors)
        if config.basis_id is not None and not _same_bases(own, factors):
            config.name_basis(None)  # it has one of its own now
        for layer in layers.values():
            layer.awaits_core.discard(adapter_name)
        return super()._remap_adapter_state_dict_for_load(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict
        )

    @staticmethod
    def _build_from_weight(layer: FrozenCoreLayer, adapter_name: str, config: FrozenCoreConfig) -> None:
        P, _, R = layer.factors(adapter_name)
        if P.is_meta or R.is_meta or layer.weight.is_meta:
            return  # only the shapes exist: parameters can be counted, bases cannot be built
        evidence = LayerEvidence(layer.name, (layer.out_features, layer.in_features), layer.dense_weight)
        basis = build_basis(config.constructor, evidence, config.basis_options(R.shape[0]))
        layer.set_basis(adapter_name, basis, random_core=not config.init_weights)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Around every forward and generate of a PeftModel: mixed batches."""
        names = kwargs.get("adapter_names")
        if names is None:
            yield
            return
        with adapter_of_each_row(self, names, num_beams=kwargs.get("num_beams") or 1):
            yield

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The bases, by their names in a PeftModel: DistributedDataParallel would broadcast them at every forward.

        They are equal on all ranks from the start: calibration shares them, seeds fix the others. What else may have
        happened to them is found out here, where DistributedDataParallel begins.

        Raises:
            CalibrationError: A rank holds other bases.
        """
        require_same_bases(
            {
                f"{adapter_name} {name}": layer.factors(adapter_name)[:2]
                for adapter_name in self.peft_config
                for name, layer in frozen_core_layers(self.model, adapter_name).items()
            }
        )
        names = (f"base_model.model.{name}" for name, _ in self.model.named_buffers())
        return [name for name in names if f".{PREFIX}" in name]

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """R float32, or as the base model if the user says so; PEFT's own cast would widen P and Q as well."""
        for layer in frozen_core_layers(self, adapter_name).values():
            layer.set_core_dtype(adapter_name, widened=autocast_adapter_dtype)


def require_basis_fits(
    origin: str, basis: SavedBasis, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLayer], adapter_name: str
) -> None:
    """Refuse a basis of other layers, ranks, scales or another base model than an adapter's.

    Raises:
        ArtifactError: What differs.
    """
    if basis.layers.keys() != layers.keys():
        odd = sorted(basis.layers.keys() ^ layers.keys())
        raise ArtifactError(
            f"The basis of {origin} has {len(basis.layers)} layers and the model {len(layers)} to adapt ({odd[0]!r} in "
            "one of them alone). Load the base model that it was calibrated on."
        )
    for name, layer in layers.items():
        (P, Q), scale, (m, n) = basis.layers[name], basis.scales[name], (layer.out_features, layer.in_features)
        r, own_scale = layer.rank(adapter_name), layer.frozencore_scale[adapter_name]
        if (P.shape, Q.shape, scale) != ((m, r), (n, r), own_scale):
            raise ArtifactError(
                f"Layer {name!r} is {m} x {n} at rank {r} and scale {own_scale:g} in this model, but the basis of "
                f"{origin} has P {tuple(P.shape)}, Q {tuple(Q.shape)} and scale {scale:g} there. Leave rank, scale and "
                "targets to the basis, and load the base model that it was calibrated on."
            )
    if basis.base is not None and not config.allow_other_base:
        odd_one = differing_layer(basis.base, {name: layer.base_samples for name, layer in layers.items()})
        if odd_one is not None:
            raise _other_base(f"The basis of {origin}", odd_one)


def _other_base(what: str, layer: str) -> ArtifactError:
    return ArtifactError(
        f"{what} was made on another base model: the weight of layer {layer!r} differs. Load that model, or "
        "pass allow_other_base=True to PeftModel.from_pretrained to use it on this one."
    )


def _same_bases(own: Mapping[str, tuple[Tensor, Tensor, Tensor]], came: Mapping[str, Factors]) -> bool:
    """Whether P and Q that came are the layers' own; those of a layer on the meta device are none."""
    return all(
        mine.is_meta or torch.equal(mine, theirs.to(mine.device, mine.dtype))
        for name, factors in came.items()
        for mine, theirs in zip(own[name], (factors.P, factors.Q), strict=False)
    )


def _cores_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """R by layer name, from PEFT's state dict of one adapter, with or without the adapter's name in the keys."""
    parts = ((key.removeprefix(BASE).partition(f".{PREFIX}R"), tensor) for key, tensor in tensors.items())
    return {layer: tensor for (layer, found, _), tensor in parts if found}


def _rank_of(config: FrozenCoreConfig, layer_name: str) -> int:
    """The rank that was asked for in a layer."""
    return config.rank_pattern.get(get_pattern_key(config.rank_pattern, layer_name), config.r)


def scale_of(config: FrozenCoreConfig, layer_name: str) -> float:
    """s of a layer: alpha over the rank that was asked for, or 1."""
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, layer_name), config.alpha)
    return 1.0 if alpha is None else alpha / _rank_of(config, layer_name)


def register_with_peft() -> None:
    """Enter the method into PEFT's tables, which ``register_peft_method`` keeps for names of its own enum."""
    kind: Any = FrozenCoreType.FROZENCORE
    PEFT_TYPE_TO_CONFIG_MAPPING[kind] = FrozenCoreConfig
    PEFT_TYPE_TO_TUNER_MAPPING[kind] = FrozenCoreModel
    PEFT_TYPE_TO_PREFIX_MAPPING[kind] = PREFIX


def frozen_core_layers(model: nn.Module, adapter_name: str) -> dict[str, FrozenCoreLayer]:
    """The layers that carry an adapter, by their name in the base model."""
    layers = (module for module in model.modules() if isinstance(module, FrozenCoreLayer))
    return {layer.name: layer for layer in layers if adapter_name in layer.frozencore_R}


def trainable_core_parameters(model: nn.Module, adapter_name: str) -> int:
    """``Σ r²`` over the layers of an adapter."""
    return sum(layer.factors(adapter_name)[2].numel() for layer in frozen_core_layers(model, adapter_name).values())
