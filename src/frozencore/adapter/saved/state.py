"""Convert the state of an adapter between a model and a file.

A file holds P, Q and R of each layer, or on a named basis all cores in one vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.saved.same_base import differing_layer, record_base
from frozencore.adapter.saved.saved_basis import SavedBasis
from frozencore.adapter.saved.seal import (
    CLASSIFIERS,
    require_modules,
    require_orthonormal,
    require_sealed,
    require_sound,
    require_sound_cores,
)
from frozencore.adapter.saved.tensors import (
    BASE,
    FLAT,
    PREFIX,
    Factors,
    cores_alone,
    flatten_cores,
    holds_no_basis,
    require_finite,
    require_finite_in,
    require_marked,
    warn_of_uncalibrated,
    with_factors,
)
from frozencore.errors import ArtifactError
from frozencore.maths.basis import known_basis
from frozencore.words import one_line

Layers = Mapping[str, FrozenCoreLayer]
_COMPILED = "_orig_mod"  # torch.compile's name for the module that it wraps
_CORE = f".{PREFIX}R"


def state_to_save(
    model: nn.Module,
    config: FrozenCoreConfig,
    adapter_name: str,
    found: dict[str, Tensor],
    whole: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Turn PEFT's state dict of an adapter into the tensors of a file, and record their hashes in the configuration.

    Args:
        whole: The model's state dict, which holds trained modules too.
    """
    config.modules_to_save = _heads_there(config, model)
    found = _with_bases(model, adapter_name, found)
    if config.basis_id is not None:
        found = cores_alone(flatten_cores(_cores_in(found)), config.basis_id)
    modules = {key: value for key, value in whole.items() if f".modules_to_save.{adapter_name}." in key}
    plain = {key: value for key, value in (found | modules).items() if not value.is_meta}
    require_finite(f"the adapter {adapter_name!r}", plain, "It is not saved. Lower the learning rate.")
    if len(plain) == len(found | modules):
        samples = {name: layer.base_samples for name, layer in frozen_core_layers(model, adapter_name).items()}
        config.prepare_seal(found, record_base(samples) if config.basis_id is None else None)
    return found


def _heads_there(config: FrozenCoreConfig, model: nn.Module) -> list[str] | None:
    """``modules_to_save`` without the names that PEFT adds for every classifier, if the model has neither head."""
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if there.isdisjoint(CLASSIFIERS):
        return [name for name in config.modules_to_save or () if name not in CLASSIFIERS] or None
    return config.modules_to_save


def state_to_load(
    model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Turn the tensors of a file into PEFT's state dict, with all checks before the model changes."""
    origin, layers = f"the adapter {adapter_name!r}", frozen_core_layers(model, adapter_name)
    own = {name: layer.factors(adapter_name) for name, layer in layers.items()}
    seal = config.take_seal()
    require_modules(origin, _heads_there(config, model), config.trainable_token_indices, state_dict)
    if FLAT in state_dict:
        require_sound_cores(origin, state_dict, config.basis_id)
        require_marked(origin, state_dict, config.basis_id)
        require_sealed(origin, seal, state_dict)
        on_meta = any(P.is_meta or Q.is_meta for P, Q, _ in own.values())
        for core_dtype in {R.dtype for _, _, R in own.values()}:
            require_finite_in(origin, state_dict[FLAT], core_dtype)
        # the bases of a model were checked when they were set
        bases = config.find_basis(origin).layers if on_meta else {name: (P, Q) for name, (P, Q, _) in own.items()}
        state_dict = with_factors(origin, state_dict, bases)
    else:
        factors = require_sound(origin, state_dict, config.coordinates)
        require_sealed(origin, seal, state_dict)
        _require_fit(origin, own, factors, config.base_model_name_or_path)
        if holds_no_basis(state_dict):
            warn_of_uncalibrated(f"The adapter {adapter_name!r}", "before it is trained or used")
        if config.basis_id is not None and not _same_bases(own, factors):
            config.name_basis(None)  # the loaded bases are not the named basis
    for layer in layers.values():
        layer.awaits_core.discard(adapter_name)
    return state_dict


def _cores_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """R by layer name, from PEFT's state dict of one adapter, with or without the adapter's name in the keys."""
    parts = ((key.removeprefix(BASE).partition(_CORE), tensor) for key, tensor in tensors.items())
    return {layer: tensor for (layer, found, _), tensor in parts if found}


def _with_bases(model: nn.Module, adapter_name: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add P and Q, which a model's state dict may hold under the name of another adapter."""
    layers, whole = frozen_core_layers(model, adapter_name), dict(found)
    for key in found:
        prefix, core, _ = key.partition(f".{PREFIX}R.")
        layer = layers.get(prefix.removeprefix(BASE)) if core else None
        if layer is not None:
            P, Q, _ = layer.factors(adapter_name)
            for side, X in (("P", P), ("Q", Q)):
                whole.setdefault(f"{prefix}.{PREFIX}{side}.{adapter_name}", X)
    return whole


def _require_fit(
    origin: str, layers: Mapping[str, tuple[Tensor, Tensor, Tensor]], came: Mapping[str, Factors], base: str | None
) -> None:
    """Refuse factors whose layers or shapes differ from the model's P, Q and R."""
    way_out = f"Load the base model that it was trained on{f': {one_line(base, 200)}' if base else ''}."
    if any(_COMPILED in name for name in came.keys() ^ layers.keys()):
        way_out = (
            "The adapter was added to a compiled model, there or here, so its layers have other names. Call "
            "torch.compile on the model with its adapter, or load a base that is compiled in the same places."
        )
    for odd, what in (
        (came.keys() - layers.keys(), "the base model lacks"),
        (layers.keys() - came.keys(), "it has nothing for"),
    ):
        if odd:
            raise ArtifactError(
                f"An adapter fits its base model layer by layer, but {what} {len(odd)} of the layers of {origin} "
                f"(first: {min(odd)!r}). {way_out}"
            )
    for name, own in layers.items():
        theirs = (came[name].P, came[name].Q, came[name].R)
        for mine, other in zip(own, theirs, strict=True):
            require_finite_in(f"layer {name!r} of {origin}", other, mine.dtype)
        if any(mine.shape != other.shape for mine, other in zip(own, theirs, strict=True)):
            m, n, r = own[0].shape[0], own[1].shape[0], own[2].shape[0]
            raise ArtifactError(
                f"Layer {name!r} is {m} x {n} at rank {r} in this model, but P {tuple(theirs[0].shape)} and Q "
                f"{tuple(theirs[1].shape)} came with {origin}. {way_out}"
            )


def _same_bases(own: Mapping[str, tuple[Tensor, Tensor, Tensor]], came: Mapping[str, Factors]) -> bool:
    """Return whether loaded P and Q equal the layers' own; a layer on the meta device has none."""
    return all(
        mine.is_meta or torch.equal(mine, theirs.to(mine.device, mine.dtype))
        for name, factors in came.items()
        for mine, theirs in zip(own[name], (factors.P, factors.Q), strict=False)
    )


def set_named_basis(configs: Mapping[str, FrozenCoreConfig], adapter_name: str, model: nn.Module) -> None:
    """Set P and Q of a new adapter to its named basis, from another adapter of the model or from the basis's folder.

    Args:
        configs: The configurations of all adapters of the model.
    """
    config, layers = configs[adapter_name], frozen_core_layers(model, adapter_name)
    origin = f"the adapter {adapter_name!r}"
    bases = _basis_in_model(configs, adapter_name, model, layers)
    if bases is None:
        basis = config.find_basis(origin)
        require_basis_fits(origin, basis, config, layers, adapter_name)
        bases = basis.layers
    for name, layer in layers.items():
        if not layer.frozencore_P[adapter_name].is_meta:
            layer.set_basis(adapter_name, known_basis(*bases[name]), random_core=not config.init_weights)
        if config.awaits_file:
            layer.awaits_core.add(adapter_name)


def _basis_in_model(
    configs: Mapping[str, FrozenCoreConfig], adapter_name: str, model: nn.Module, layers: Layers
) -> dict[str, tuple[Tensor, Tensor]] | None:
    """P and Q of another adapter on the same basis, with the same layers and scales; None if there is none."""
    for other, config in configs.items():
        if other == adapter_name or config.basis_id != configs[adapter_name].basis_id:
            continue
        if frozen_core_layers(model, other).keys() != layers.keys():
            continue
        scales = (layer.frozencore_scale for layer in layers.values())
        bases = {name: layer.factors(other)[:2] for name, layer in layers.items()}
        if all(scale[other] == scale[adapter_name] for scale in scales) and not any(
            X.is_meta for pair in bases.values() for X in pair
        ):
            return bases
    return None


def require_basis_fits(
    origin: str, basis: SavedBasis, config: FrozenCoreConfig, layers: Layers, adapter_name: str
) -> None:
    """Refuse a basis whose layers, ranks, scales or base model differ from the adapter's."""
    if basis.layers.keys() != layers.keys():
        odd = sorted(basis.layers.keys() ^ layers.keys())
        raise ArtifactError(
            f"The basis of {origin} has {len(basis.layers)} layers and the model {len(layers)} to adapt ({odd[0]!r} in "
            "one of them alone). Load the base model that it was calibrated on."
        )
    for name, layer in layers.items():
        for X, own in zip(basis.layers[name], layer.factors(adapter_name), strict=False):
            require_finite_in(f"layer {name!r} of the basis of {origin}", X, own.dtype)
        (P, Q), scale, (m, n) = basis.layers[name], basis.scales[name], layer.shape
        r, own_scale = len(layer.core(adapter_name)), layer.frozencore_scale[adapter_name]
        if (P.shape, Q.shape, scale) != ((m, r), (n, r), own_scale):
            raise ArtifactError(
                f"Layer {name!r} is {m} x {n} at rank {r} and scale {own_scale:g} in this model, but the basis of "
                f"{origin} has P {tuple(P.shape)}, Q {tuple(Q.shape)} and scale {scale:g} there. Leave rank, scale and "
                "targets to the basis, and load the base model that it was calibrated on."
            )
    require_orthonormal(f"the basis of {origin}", basis.layers, config.coordinates)
    require_same_base(f"The basis of {origin}", basis.base, config, layers)


def require_same_base(what: str, recorded: Mapping[str, str] | None, config: FrozenCoreConfig, layers: Layers) -> None:
    """Refuse a base model whose weights differ from the record, unless the configuration allows it."""
    if recorded is None or config.allow_other_base:
        return
    odd = differing_layer(recorded, {name: layer.base_samples for name, layer in layers.items()})
    if odd is not None:
        raise other_base(what, odd)


def other_base(what: str, layer: str) -> ArtifactError:
    """The error for a layer whose weight differs from the record."""
    return ArtifactError(
        f"{what} was made on another base model: the weight of layer {layer!r} differs. Load that model, or "
        "pass allow_other_base=True to PeftModel.from_pretrained to use it on this one."
    )
