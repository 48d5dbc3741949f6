"""Adapters on one basis: their weighted sums, and saved adapters reduced to cores beside a named basis.

On one basis ``Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ`` holds exactly, with a core of the same size. So adapters in folders or
in one model are averaged, added and subtracted by their cores.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig, options_of_basis
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.saved.card import num_tokens
from frozencore.adapter.saved.folder import read_tensors, write_adapter
from frozencore.adapter.saved.saved_basis import SavedBasis, load_basis, write_basis
from frozencore.adapter.saved.tensors import (
    FLAT,
    PREFIX,
    Factors,
    cores_alone,
    flatten_cores,
    layer_factors,
    with_factors,
)
from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.basis import known_basis
from frozencore.maths.linalg import weighted_sum

ScaledBasis = tuple[Tensor, Tensor, float]
"""P, Q and the scale of a layer."""


def merge_adapters(adapters: Sequence[str | Path], out: str | Path, *, weights: Sequence[float] | None = None) -> Path:
    """Write the weighted sum of saved adapters on one basis, in the form of the first.

    Args:
        adapters: Folders of the adapters.
        out: New folder.
        weights: A weight for each adapter; by default 1/K, the mean.

    Raises:
        ConfigError: There is no adapter, or the number of finite weights is wrong.
        ArtifactError: Layers, bases, ranks or scales differ, modules besides cores were trained, or a folder cannot be
            read or written.
    """
    if not adapters:
        raise ConfigError("A sum needs an adapter, but none was named.")
    weights = [1 / len(adapters)] * len(adapters) if weights is None else weights
    read = [_read(Path(folder)) for folder in adapters]
    config, first = read[0]
    for folder, other in zip(adapters, read, strict=True):
        _require_one_basis(str(adapters[0]), bases_of_folder(*read[0]), str(folder), bases_of_folder(*other))
    cores = {name: weighted_sum([factors[name].R for _, factors in read], weights) for name in first}
    flat = flatten_cores(cores)
    if config.basis_id is None:
        tensors = with_factors(str(out), {FLAT: flat}, {name: (f.P, f.Q) for name, f in first.items()})
    else:
        tensors = cores_alone(flat, config.basis_id)
    return write_adapter(Path(out), tensors, like=Path(adapters[0]))


def add_weighted_sum(tuner: Any, adapters: Sequence[str], weights: Sequence[float], name: str) -> None:
    """Add the adapter ``Σ wᵢ Rᵢ`` on the basis of the others to a model; nothing changes if they share no basis.

    Args:
        tuner: A :class:`frozencore.FrozenCoreModel`.
    """
    missing = [adapter for adapter in adapters if adapter not in tuner.peft_config]
    if missing or not adapters:
        raise ConfigError(
            f"The adapters of a sum must be loaded ({', '.join(tuner.peft_config)}), but {missing or 'none'} came."
        )
    for adapter in adapters:
        if tuner.peft_config[adapter].trains_modules:
            raise ConfigError(f"Only cores are summed, but the adapter {adapter!r} trained other modules too.")
    layers, first = {adapter: frozen_core_layers(tuner, adapter) for adapter in adapters}, adapters[0]
    for other in adapters:
        _require_one_basis(
            repr(first), _bases_in_model(layers[first], first), repr(other), _bases_in_model(layers[other], other)
        )
    sums = {
        layer_name: weighted_sum([layer.factors(adapter)[2] for adapter in adapters], weights)
        for layer_name, layer in layers[first].items()
    }
    tuner.peft_config[name] = copy.deepcopy(tuner.peft_config[first])
    tuner.inject_adapter(tuner.model, name)
    for layer_name, layer in layers[first].items():
        layer.set_basis(name, known_basis(*layer.factors(first)[:2]))
        with torch.no_grad():
            layer.factors(name)[2].copy_(sums[layer_name])


def differing_basis(one: Mapping[str, ScaledBasis], other: Mapping[str, ScaledBasis]) -> str | None:
    """The first layer, by name, whose basis or scale differs or is missing on one side; None if all are equal."""
    return next((name for name in sorted(one.keys() | other.keys()) if not _same(one.get(name), other.get(name))), None)


def bases_of_folder(config: FrozenCoreConfig, factors: Mapping[str, Factors]) -> dict[str, ScaledBasis]:
    """P, Q and the scale of each layer of a saved adapter."""
    return {name: (f.P, f.Q, config.scale_of(name)) for name, f in factors.items()}


def _bases_in_model(layers: Mapping[str, FrozenCoreLayer], adapter: str) -> dict[str, ScaledBasis]:
    return {name: (*layer.factors(adapter)[:2], layer.frozencore_scale[adapter]) for name, layer in layers.items()}


def _read(folder: Path) -> tuple[FrozenCoreConfig, Mapping[str, Factors]]:
    config, tensors = read_tensors(folder)
    if config.trains_modules:
        raise ArtifactError(
            f"Only cores are summed, but the adapter in {folder} trained other modules too (modules_to_save or "
            "trainable_token_indices)."
        )
    return config, layer_factors(str(folder), tensors)


def _require_one_basis(
    first: str, one: Mapping[str, ScaledBasis], second: str, other: Mapping[str, ScaledBasis]
) -> None:
    layer = differing_basis(one, other)
    if layer is not None:
        raise ArtifactError(
            f"Cores are summed on one basis, but the adapters {first} and {second} differ in basis, rank or scale at "
            f"layer {layer!r}. Sum adapters that were trained on the same saved basis."
        )


def _same(one: ScaledBasis | None, other: ScaledBasis | None) -> bool:
    if one is None or other is None:
        return False
    pairs = zip(one[:2], other[:2], strict=True)
    return one[2] == other[2] and all(X.shape == Y.shape and X.dtype == Y.dtype and torch.equal(X, Y) for X, Y in pairs)


def pack_adapter(
    adapter: str | Path, basis: str | Path | None, out: str | Path, *, dtype: torch.dtype | None = None
) -> Path:
    """Write an adapter without its basis, as cores only.

    Args:
        adapter: Folder of an adapter whose P and Q are exactly those of the basis.
        basis: Folder of the basis, or a hub id. None: the folder ``basis`` beside ``out``, written from the adapter if
            missing.
        out: New folder.
        dtype: The dtype of the cores; by default the saved one. Cores in 16 bits are rounded.

    Raises:
        ArtifactError: The adapter has another basis or already holds cores only, or a folder cannot be read or written.
    """
    config, tensors = read_tensors(adapter)
    if config.basis_id is not None:
        raise ArtifactError(f"{adapter} holds cores alone already, on the basis {config.basis_id[:12]}.")
    factors = layer_factors(str(adapter), tensors)
    if basis is None:
        basis = Path(out).parent / "basis"
        if not basis.exists():
            _write_own_basis(adapter, config, factors, basis)
    saved = load_basis(basis)
    _require_same_basis(str(adapter), config, factors, str(basis), saved)
    cores = flatten_cores({name: f.R for name, f in factors.items()})
    others = {key: tensor for key, tensor in tensors.items() if f".{PREFIX}" not in key}
    changes = {"basis": str(basis), "basis_id": saved.identity, "base": None}
    packed = cores_alone(cores if dtype is None else cores.to(dtype), saved.identity) | others
    return write_adapter(Path(out), packed, like=Path(adapter), changes=changes)


def unpack_adapter(adapter: str | Path, out: str | Path, *, basis: str | Path | None = None) -> Path:
    """Write an adapter of cores only as one that includes its basis.

    Args:
        adapter: Folder of an adapter of cores only.
        out: New folder.
        basis: Its basis, if it is not in the folder, beside it or at the place it names.

    Raises:
        ArtifactError: The adapter already holds its basis, the basis is not found, or a folder cannot be read or
            written.
    """
    config, tensors = read_tensors(adapter, basis=basis)
    if config.basis_id is None:
        raise ArtifactError(f"{adapter} holds its basis already.")
    base = config.find_basis(str(adapter)).base
    changes = {"basis": None, "basis_revision": None, "basis_id": None, "base": base}
    return write_adapter(Path(out), tensors, like=Path(adapter), changes=changes)


def _write_own_basis(adapter: str | Path, config: FrozenCoreConfig, factors: Mapping[str, Factors], out: Path) -> None:
    if config.initial_step:
        raise ArtifactError(f"The cores in {adapter} began with an initial step, which no basis holds: keep it whole.")
    known = options_of_basis()
    write_basis(
        out,
        {f"{name}.{side}": X for name, f in factors.items() for side, X in (("P", f.P), ("Q", f.Q))},
        scales={name: config.scale_of(name) for name in factors},
        options={name: value for name, value in config.to_dict().items() if name in known},
        calibrated_on=num_tokens(config.calibration_tokens),
        base=(config.seal or {}).get("base"),
        base_model=config.base_model_name_or_path,
    )


def _require_same_basis(
    origin: str, config: FrozenCoreConfig, factors: Mapping[str, Factors], place: str, basis: SavedBasis
) -> None:
    if factors.keys() != basis.layers.keys():
        odd = sorted(factors.keys() ^ basis.layers.keys())
        raise ArtifactError(
            f"An adapter is packed beside its own basis, but {odd[0]!r} ({len(odd)} layers in all) is in one of "
            f"{origin} and {place} alone. Name the basis that it was trained on."
        )
    of_basis = {name: (P, Q, basis.scales[name]) for name, (P, Q) in basis.layers.items()}
    layer = differing_basis(bases_of_folder(config, factors), of_basis)
    if layer is not None:
        raise ArtifactError(
            f"An adapter is packed beside its own basis, but P, Q or the scale of layer {layer!r} of {origin} are "
            f"not those of {place}. Name the basis that it was trained on."
        )
