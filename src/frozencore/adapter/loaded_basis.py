"""The basis of an adapter in a model: taken out, put in, saved, and known by its id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from frozencore.adapter.basis import Basis, require_set
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.loaded_adapter import LoadedAdapter
from frozencore.errors import ArtifactError, CalibrationError, ConfigError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.linalg import require_finite


def adapter_for_new_bases(model: nn.Module, adapter_name: str | None, *, reset: bool) -> LoadedAdapter:
    """The adapter (by default the active one), if it may get a new basis."""
    adapter = LoadedAdapter.of(model, adapter_name)
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise CalibrationError(
                f"Calibration looks at the base weights, but layer {name!r} has an adapter merged into them. "
                "Call unmerge_adapter() first."
            )
    for name, layer in adapter.layers.items():
        R = layer.stored_core(adapter.name)
        if not reset and bool(R.any()):
            raise CalibrationError(
                f"The core of layer {name!r} is not zero: a new basis under it would change what it means. "
                "Pass reset=True to give up what it learned."
            )
    return adapter


def get_basis(model: nn.Module, adapter_name: str | None = None) -> Basis:
    """Copy the basis of an adapter to the CPU.

    Raises:
        ConfigError: The model has no such frozen-core adapter.
        CalibrationError: It has no basis yet.
    """
    adapter = LoadedAdapter.of(model, adapter_name)
    here = adapter.bases
    require_set(here)
    copies = {name: replace(b, P=b.P.detach().clone().cpu(), Q=b.Q.detach().clone().cpu()) for name, b in here.items()}
    return adapter.config.make_basis(copies, base=adapter.base_record)


@torch.inference_mode(False)  # P and Q are kept, and a backward pass reads them
def set_basis(
    model: nn.Module,
    basis: Basis | Mapping[str, LayerBasis],
    *,
    adapter_name: str | None = None,
    reset: bool = False,
) -> None:
    """Give an adapter a basis, and reset its core to zero.

    Args:
        basis: A basis of :func:`get_basis` or :func:`frozencore.load_basis`, or the layers that ``build_bases``
            returns, which have no record of their base model.
        reset: Allow a new basis under a core that has been trained (the core is lost).

    Raises:
        ConfigError: The model has no such frozen-core adapter, or its configuration has an initial step.
        ArtifactError: The basis has other layers, shapes, ranks or scales, or another base model.
        CalibrationError: An adapter is merged, a core is trained, or the basis has NaN or Inf.
        ModelError: A core is pruned, parametrised or offloaded.
    """
    adapter = adapter_for_new_bases(model, adapter_name, reset=reset)
    if not isinstance(basis, Basis):
        put_layers(adapter, basis)
    else:
        config = adapter.config
        attach_basis(adapter, basis)
        config.calibration_tokens = basis.options.get("calibration_tokens")
        config.learning_rate = basis.options.get("learning_rate")
        config.attach_basis_id(basis.id, basis.place, basis.revision)


def put_layers(adapter: LoadedAdapter, bases: Mapping[str, LayerBasis]) -> None:
    """Set P and Q of every layer and its core's start; nothing is changed if one does not fit."""
    config = adapter.config
    scales = {name: layer.frozencore_scale[adapter.name] for name, layer in adapter.layers.items()}
    scaled = {name: replace(basis, scale=scales.get(name, basis.scale)) for name, basis in bases.items()}
    require_fit("The basis", scaled, adapter, "Use the adapter's rank and target_modules.")
    _require_start(config, bases)
    for name, layer in adapter.layers.items():
        start = config.constructor_entry.start_core(bases[name], config.basis_options(), scales[name])
        layer.set_basis(adapter.name, bases[name], start_core=start, random_core=not config.init_weights)
    config.attach_basis_id(None)
    config.calibration_tokens = config.learning_rate = None


def attach_basis(adapter: LoadedAdapter, basis: Basis) -> None:
    """Set P and Q of an adapter to those of a basis, with its id."""
    origin, config = f"The basis {basis.id}", adapter.config
    if not config.load_bases:
        _require_start(config, basis.layers)
    way_out = "Leave rank, scale and targets to the basis, and load the base model that it was calibrated on."
    require_fit(origin, basis.layers, adapter, way_out)
    adapter.require_same_base(origin, basis.base)
    for name, layer in adapter.layers.items():
        if not layer.frozencore_P[adapter.name].is_meta:
            layer.set_basis(adapter.name, basis.layers[name], random_core=not config.init_weights)
            layer.attach_basis_id(adapter.name, basis.id, basis.digests[name])


def _require_start(config: FrozenCoreConfig, bases: Mapping[str, LayerBasis]) -> None:
    """Refuse an initial step where the bases do not have the core that it starts from."""
    if config.initial_step and any(basis.initial_core is None for basis in bases.values()):
        raise ConfigError(
            f"initial_step={config.initial_step:g} starts from a core that only a calibration computes, and a saved "
            "basis has none. Call calibrate, with moments collected once, or leave initial_step out."
        )


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
        The id of the basis.

    Raises:
        ConfigError: The model has no such frozen-core adapter.
        CalibrationError: It has no basis yet.
        ArtifactError: The folder is there already, or cannot be written.
    """
    adapter = LoadedAdapter.of(model, adapter_name)
    basis = adapter.make_basis(calibrated_on)
    require_set(basis.layers)
    basis.write(Path(folder), overwrite=overwrite)
    adapter.config.attach_basis_id(basis.id, str(folder))
    adapter.attach_id(basis)
    return basis.id


def basis_id(model: nn.Module, adapter_name: str | None = None) -> str:
    """The id of the basis of an adapter (by default the active one) of a model."""
    return LoadedAdapter.of(model, adapter_name).basis_id


def require_fit(origin: str, bases: Mapping[str, LayerBasis], adapter: LoadedAdapter, way_out: str) -> None:
    """Refuse bases that are not finite, and those of other layers, shapes or scales than an adapter's.

    Args:
        origin: The basis, as the beginning of a sentence.
    """
    for name, basis in bases.items():
        for X in (basis.P, basis.Q):
            require_finite(X, f"{origin}: layer {name!r}")
    theirs = {name: (basis.P.shape, basis.Q.shape, basis.scale) for name, basis in bases.items()}
    ours = {name: (basis.P.shape, basis.Q.shape, basis.scale) for name, basis in adapter.bases.items()}
    if odd := [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]:
        raise ArtifactError(
            f"{origin} does not fit this model: it has {_in_words(theirs.get(odd[0]))} for layer {odd[0]!r}, and this "
            f"model {_in_words(ours.get(odd[0]))} ({len(odd)} layers differ). {way_out}"
        )


def _in_words(facts: Any) -> str:
    """The shapes of P and Q, and the scale; None is a layer that is not there."""
    if facts is None:
        return "nothing"
    (m, r), (n, _), scale = facts
    return f"{m} x {n} of rank {r} at scale {scale:g}"
