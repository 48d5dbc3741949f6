"""Sums of adapters: on one basis ``Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ``, exactly, with a core of the same size.

So adapters are averaged, added and subtracted by their cores: adapters in folders, or adapters of one model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.saved.folder import read_tensors, write_adapter
from frozencore.adapter.saved.tensors import FLAT, Factors, flatten_cores, layer_factors, with_factors
from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.basis import known_basis
from frozencore.maths.linalg import weighted_sum

ScaledBasis = tuple[Tensor, Tensor, float]
"""P, Q and the scale of a layer."""


def merge_adapters(adapters: Sequence[str | Path], out: str | Path, *, weights: Sequence[float] | None = None) -> Path:
    """Write the weighted sum of saved adapters of one basis, in the form of the first.

    Args:
        adapters: Folders.
        out: New folder.
        weights: One for each; by default 1/K, which is the mean.

    Raises:
        ConfigError: No adapter, or not as many finite weights.
        ArtifactError: Other layers, bases, ranks or scales, trained modules besides cores, or a folder that cannot be
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
    tensors = {FLAT: flatten_cores(cores)}
    if config.basis_id is None:
        tensors = with_factors(str(out), tensors, {name: (f.P, f.Q) for name, f in first.items()})
    return write_adapter(Path(out), tensors, like=Path(adapters[0]))


def add_weighted_sum(tuner: Any, adapters: Sequence[str], weights: Sequence[float], name: str) -> None:
    """Add the adapter ``Σ wᵢ Rᵢ`` on the basis of the others to a model; nothing changes where they share no basis.

    Args:
        tuner: A :class:`frozencore.FrozenCoreModel`.
    """
    missing = [adapter for adapter in adapters if adapter not in tuner.peft_config]
    if missing or not adapters:
        raise ConfigError(
            f"A sum is of adapters that are there ({', '.join(tuner.peft_config)}), but {missing or 'none'} came."
        )
    for adapter in adapters:
        tuner.peft_config[adapter].require_one_round("A sum")
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
    tuner.peft_config[name].load_bases = True  # so that none is built
    tuner.inject_adapter(tuner.model, name)
    for layer_name, layer in layers[first].items():
        layer.set_basis(name, known_basis(*layer.factors(first)[:2]))
        with torch.no_grad():
            layer.factors(name)[2].copy_(sums[layer_name])
        layer.awaits_core.discard(name)


def differing_basis(one: Mapping[str, ScaledBasis], other: Mapping[str, ScaledBasis]) -> str | None:
    """The first layer, by name, whose basis or scale differs or is missing on one side; None where all are equal."""
    return next((name for name in sorted(one.keys() | other.keys()) if not _same(one.get(name), other.get(name))), None)


def bases_of_folder(config: FrozenCoreConfig, factors: Mapping[str, Factors]) -> dict[str, ScaledBasis]:
    """P, Q and the scale of each layer of a saved adapter."""
    return {name: (f.P, f.Q, config.scale_of(name)) for name, f in factors.items()}


def _bases_in_model(layers: Mapping[str, FrozenCoreLayer], adapter: str) -> dict[str, ScaledBasis]:
    return {name: (*layer.factors(adapter)[:2], layer.frozencore_scale[adapter]) for name, layer in layers.items()}


def _read(folder: Path) -> tuple[FrozenCoreConfig, Mapping[str, Factors]]:
    config, tensors = read_tensors(folder)
    config.require_one_round("A sum")
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
