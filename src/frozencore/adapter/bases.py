"""Get bases from an adapter, set them in another, and save them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig, find_adapter
from frozencore.adapter.layer import FrozenCoreLinear, base_samples_of, bases_of, frozen_core_layers
from frozencore.adapter.saved.base_record import differing_layer, other_base, record_base, record_in
from frozencore.adapter.saved.basis import Bases, SavedBasis
from frozencore.adapter.saved.tensors import hash_bases, require_finite_in, require_orthonormal, require_scales
from frozencore.errors import ArtifactError, CalibrationError, ConfigError
from frozencore.maths.basis import ORTHONORMAL_COORDINATES, LayerBasis, known_basis


def adapter_for_new_bases(
    model: nn.Module, adapter_name: str | None, *, reset: bool
) -> tuple[str, FrozenCoreConfig, dict[str, FrozenCoreLinear]]:
    """The name, configuration and layers of an adapter (by default the active one) that may get new bases."""
    adapter_name, config = find_adapter(model, adapter_name)
    layers = frozen_core_layers(model, adapter_name)
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise CalibrationError(
                f"Calibration looks at the base weights, but layer {name!r} has an adapter merged into them. "
                "Call unmerge_adapter() first."
            )
    for name, layer in layers.items():
        if not reset and bool(layer.core(adapter_name).any()):
            raise CalibrationError(
                f"The core of layer {name!r} is not zero: a new basis under it would change what it means. "
                "Pass reset=True to give up what it learned."
            )
    return adapter_name, config, layers


def get_bases(model: nn.Module, adapter_name: str | None = None) -> dict[str, Tensor]:
    """Copy P (m x r) and Q (n x r) of every layer to the CPU, under ``<layer>.P`` and ``<layer>.Q``.

    ``safetensors.torch.save_file`` accepts the result.

    Raises:
        ConfigError: The model has no such frozen-core adapter.
        CalibrationError: It has no bases yet.
    """
    adapter_name, _ = find_adapter(model, adapter_name)
    bases: dict[str, Tensor] = {}
    for name, layer in frozen_core_layers(model, adapter_name).items():
        layer.require_basis(adapter_name)
        P, Q, _ = layer.basis(adapter_name)
        bases |= {f"{name}.{side}": X.detach().clone().cpu() for side, X in (("P", P), ("Q", Q))}
    return bases


def set_bases(
    model: nn.Module,
    bases: Mapping[str, Tensor] | Mapping[str, LayerBasis] | SavedBasis,
    *,
    adapter_name: str | None = None,
    reset: bool = False,
) -> None:
    """Give an adapter the bases of :func:`get_bases` or ``build_bases``, and reset its cores to zero.

    Args:
        bases: Bases of the same layers and ranks. The base model is not checked; on other weights the bases are as
            good as random ones. A basis of :func:`frozencore.load_basis` is checked, and the adapter is then saved as
            cores only, with the name of the basis.
        reset: Allow a new basis under a core that has been trained (the core is lost).

    Raises:
        ConfigError: The model has no such frozen-core adapter, or its configuration has an initial step.
        ArtifactError: A saved basis has other layers, ranks or scales, or another base model.
        CalibrationError: Layers or shapes differ, a basis is not finite or not orthonormal although its coordinates
            are, an adapter is merged, or a core is trained. No basis is changed then.
    """
    adapter_name, config, layers = adapter_for_new_bases(model, adapter_name, reset=reset)
    saved = bases if isinstance(bases, SavedBasis) else None
    given: Mapping[str, Any] = bases.tensors if isinstance(bases, SavedBasis) else bases
    built = {name: basis for name, basis in given.items() if isinstance(basis, LayerBasis)}
    if config.initial_step and not built:
        raise ConfigError(
            f"initial_step={config.initial_step:g} starts from a core that bases alone do not hold. "
            "Call calibrate, with moments collected once, or leave initial_step out."
        )
    if saved is not None:
        _require_basis_fits(str(saved.place), saved, config, layers, adapter_name)
    if built:
        given = {f"{name}.{side}": X for name, basis in built.items() for side, X in (("P", basis.P), ("Q", basis.Q))}
    expected = {f"{name}.{side}" for name in layers for side in "PQ"}
    for odd, what in ((expected - given.keys(), "are missing"), (given.keys() - expected, "fit no layer")):
        if odd:
            raise CalibrationError(
                f"{len(odd)} of {len(expected)} bases {what} (first: {min(odd)!r}). "
                "Use bases that get_bases took from an adapter with the same target_modules."
            )
    checked = {name: _checked(name, given, layer, adapter_name, config) for name, layer in layers.items()}
    put_bases(adapter_name, config, layers, checked | built)
    config.calibration_tokens = None  # unknown from bases alone
    if saved is not None:
        config.calibration_tokens = saved.options.get("calibration_tokens")
        config.name_basis(saved.identity, saved.place, saved.revision)
        for layer in layers.values():
            layer.name_basis(adapter_name, saved.identity)


def put_bases(
    adapter_name: str, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLinear], bases: Mapping[str, LayerBasis]
) -> None:
    """Set the basis of every layer and its core's start; nothing is changed if one does not fit."""
    for name, layer in layers.items():
        layer.require_fit(len(layer.core(adapter_name)), bases[name])
    for name, layer in layers.items():
        scale = layer.frozencore_scale[adapter_name]
        start = config.constructor_entry.start_core(bases[name], config.basis_options(), scale)
        layer.set_basis(adapter_name, bases[name], start_core=start, random_core=not config.init_weights)
    config.name_basis(None)


def save_basis(
    model: nn.Module,
    folder: str | Path,
    *,
    adapter_name: str | None = None,
    calibrated_on: str | None = None,
    overwrite: bool = False,
) -> str:
    """Write an adapter's P and Q as a basis for many adapters; this adapter now refers to it.

    Args:
        folder: A new folder, for ``basis.json`` and ``basis.safetensors``.
        calibrated_on: A description of the calibration data.
        overwrite: Replace an existing basis.

    Returns:
        The identity of the basis: the hash of its content.

    Raises:
        ConfigError: The model has no such frozen-core adapter, or its cores start from an initial step.
        CalibrationError: It has no bases yet.
        ArtifactError: The folder is there already, or cannot be written.
    """
    adapter_name, config = find_adapter(model, adapter_name)
    layers = frozen_core_layers(model, adapter_name)
    for layer in layers.values():
        layer.require_basis(adapter_name)
    bases, base = bases_of(layers, adapter_name), record_base(base_samples_of(layers))
    saved = config.saved_basis(bases, base=base, calibrated_on=calibrated_on)
    identity = saved.write(Path(folder), overwrite=overwrite)
    config.name_basis(identity, str(folder))
    for layer in layers.values():
        layer.name_basis(adapter_name, identity)
    return identity


def named_basis(config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLinear], adapter_name: str) -> str | None:
    """The identity of an adapter's named basis, if all P and Q still are of it or have no values yet."""
    factors = (X for layer in layers.values() for X in layer.basis(adapter_name)[:2])
    if config.basis_id is None or any(X.is_meta for X in factors):
        return config.basis_id
    found = {layer.named_basis(adapter_name) for layer in layers.values()}
    return config.basis_id if found == {config.basis_id} else None


def _checked(
    name: str, bases: Mapping[str, Any], layer: FrozenCoreLinear, adapter_name: str, config: FrozenCoreConfig
) -> LayerBasis:
    P, Q = bases[f"{name}.P"], bases[f"{name}.Q"]
    for X in (P, Q):
        if not isinstance(X, Tensor) or X.ndim != 2 or not X.is_floating_point():
            what = f"{X.dtype} {tuple(X.shape)}" if isinstance(X, Tensor) else type(X).__name__
            raise CalibrationError(f"A basis is a matrix of floats, but layer {name!r} was given {what}.")
        if not torch.isfinite(X).all():
            raise CalibrationError(f"A basis of layer {name!r} holds NaN or Inf. Take the bases out again.")
    basis = known_basis(P, Q)
    layer.require_fit(len(layer.core(adapter_name)), basis)
    rounding = max(1e-4, 2 * torch.finfo(P.dtype).eps)
    if config.coordinates in ORTHONORMAL_COORDINATES and basis.orthonormality_error() > rounding:
        raise CalibrationError(
            f"With coordinates={config.coordinates!r} a basis is orthonormal, but that of layer {name!r} is off by "
            f"{basis.orthonormality_error():.2g}. Take bases from an adapter with the same coordinates."
        )
    return basis


def basis_fingerprint(model: nn.Module) -> str:
    """SHA-256 of every layer's P and Q."""
    return hash_bases(bases_of(frozen_core_layers(model, "default"), "default"))


def set_named_basis(
    origin: str, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLinear], adapter_name: str
) -> None:
    """Set P and Q of a new adapter to its named basis, read from its folder."""
    basis = config.find_basis(origin)
    _require_basis_fits(origin, basis, config, layers, adapter_name)
    for name, layer in layers.items():
        if not layer.frozencore_P[adapter_name].is_meta:
            P, Q, _ = basis.layers[name]
            layer.set_basis(adapter_name, known_basis(P, Q), random_core=not config.init_weights)
            layer.name_basis(adapter_name, basis.identity)


def _require_basis_fits(
    origin: str, basis: SavedBasis, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLinear], adapter_name: str
) -> None:
    """Refuse a basis whose layers, ranks, scales or base model differ from the adapter's."""
    origin = f"the basis of {origin}"
    way_out = "Leave rank, scale and targets to the basis, and load the base model that it was calibrated on."
    require_fit(origin, basis.layers, bases_of(layers, adapter_name), way_out)
    require_orthonormal(origin, basis.layers, config.coordinates)
    require_same_base(f"T{origin[1:]}", basis.base, config, layers)


def require_layers(origin: str, came: Collection[str], own: Collection[str], way_out: str) -> None:
    """Refuse an adapter of other layers than a model's."""
    for odd, what in (
        (set(came) - set(own), "the base model lacks"),
        (set(own) - set(came), "it has nothing for"),
    ):
        if odd:
            raise ArtifactError(
                f"An adapter fits its base model layer by layer, but {what} {len(odd)} of the layers of {origin} "
                f"(first: {min(odd)!r}). {way_out}"
            )


def require_fit(
    origin: str,
    came: Mapping[str, tuple[Tensor, Tensor, Tensor | float]],
    own: Mapping[str, tuple[Tensor, Tensor, Tensor | float]],
    way_out: str,
) -> None:
    """Refuse factors of other layers, shapes or scales than a model's, or with values that overflow in its dtype.

    Args:
        came, own: P, Q, and R or the scale, by layer name.
    """
    require_layers(origin, came, own, way_out)
    for name, mine in own.items():
        for X, Y in zip(mine, came[name], strict=True):
            if isinstance(X, Tensor) and isinstance(Y, Tensor):
                require_finite_in(f"layer {name!r} of {origin}", Y, X.dtype)
        if any(getattr(X, "shape", X) != getattr(Y, "shape", Y) for X, Y in zip(mine, came[name], strict=True)):
            raise ArtifactError(
                f"Layer {name!r} has {_in_words(*mine)} in this model, but {_in_words(*came[name])} came with "
                f"{origin}. {way_out}"
            )


def _in_words(P: Tensor, Q: Tensor, third: Tensor | float) -> str:
    last = f"R {tuple(third.shape)}" if isinstance(third, Tensor) else f"scale {third:g}"
    return f"P {tuple(P.shape)}, Q {tuple(Q.shape)} and {last}"


def require_trained_alike(
    origin: str,
    tensors: Mapping[str, Tensor],
    config: FrozenCoreConfig,
    layers: Mapping[str, FrozenCoreLinear],
    bases: Bases,
) -> None:
    """Refuse cores of the same layers that were trained at other scales or on another base model than an adapter's."""
    require_scales(origin, tensors, {name: basis.scale for name, basis in bases.items()})
    require_same_base(f"What {origin} holds", record_in(tensors), config, layers)


def require_same_base(
    what: str, recorded: Mapping[str, str] | None, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLinear]
) -> None:
    """Refuse a base model whose weights differ from the record, unless the configuration allows it."""
    if recorded is None or config.allow_other_base:
        return
    odd = differing_layer(recorded, base_samples_of(layers))
    if odd is not None:
        raise other_base(what, odd)
