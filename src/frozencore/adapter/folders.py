"""Folders of adapters without a model: read and write them, sum them, pack them beside a named basis.

On one basis ``Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ`` holds exactly, with a core of the same size. So adapters are averaged,
added and subtracted by their cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.saved.adapter import SavedAdapter
from frozencore.adapter.saved.base_record import require_one_base
from frozencore.adapter.saved.basis import Bases, ScaledBasis, load_basis
from frozencore.adapter.saved.card import CARD_FILE, with_scores
from frozencore.adapter.saved.tensors import (
    CORES,
    Factors,
    cores_key,
    flatten_cores,
    layer_factors,
    other_keys,
    require_scales,
    trained_with,
    vector_of,
    with_factors,
)
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import HEADER_FILE
from frozencore.maths.linalg import weighted_sum


def read_adapter(directory: str | Path) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """Read the configuration, and the factors by layer name, of a folder that ``save_pretrained`` wrote."""
    config, tensors = read_tensors(directory)
    return config, _factors_in(directory, tensors, config)


def _factors_in(directory: str | Path, tensors: Mapping[str, Tensor], config: FrozenCoreConfig) -> dict[str, Factors]:
    found = layer_factors(str(directory), tensors)
    return {name: Factors(P, Q, R, config.scale_of(name)) for name, (P, Q, R) in found.items()}


def read_adapter_or_basis(directory: str | Path) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """Read an adapter, or a saved basis as an adapter with zero cores."""
    if not (Path(directory) / HEADER_FILE).is_file():
        return read_adapter(directory)
    layers = load_basis(directory).layers
    config = FrozenCoreConfig(basis=str(directory))
    return config, {name: Factors(P, Q, P.new_zeros(P.shape[1], P.shape[1]), s) for name, (P, Q, s) in layers.items()}


def read_tensors(
    directory: str | Path, *, basis: str | Path | None = None
) -> tuple[FrozenCoreConfig, dict[str, Tensor]]:
    """Read the configuration, and P, Q, R and trained modules under the names of a file that holds them all.

    The record of the base model in the configuration of cores alone is their basis's.

    Args:
        basis: The basis of an adapter of cores alone, if not in the folder, beside it or where it says.
    """
    saved = SavedAdapter.read(Path(directory))
    config = FrozenCoreConfig.of_file(Path(directory), saved.values)
    tensors = dict(saved.tensors)
    if vector_of(tensors) is not None:
        config.basis = config.basis if basis is None else str(basis)
        named = config.find_basis(saved.origin)
        tensors = with_factors(saved.origin, tensors, named.layers) | trained_with(named.layers, named.base)
        config.base_record = named.base
    factors = layer_factors(saved.origin, tensors)
    for name, (P, Q, R) in factors.items():
        if min(config.rank_of(name), len(P), len(Q)) != len(R):
            raise ArtifactError(
                f"The configuration of {directory} gives layer {name!r} another rank than its factors have. Save or "
                "download the adapter again."
            )
    require_scales(saved.origin, tensors, {name: config.scale_of(name) for name in factors})
    return config, tensors


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
    read = [read_adapter(folder) for folder in adapters]
    for folder, (config, _) in zip(adapters, read, strict=True):
        if config.trains_modules:
            raise ArtifactError(
                f"Only cores are summed, but the adapter in {folder} trained other modules too (modules_to_save or "
                "trainable_token_indices)."
            )
    config, first = read[0]
    for folder, (its, factors) in zip(adapters, read, strict=True):
        require_one_basis(str(adapters[0]), _bases_in(first), str(folder), _bases_in(factors))
        require_one_base(adapters[0], config.base_record, folder, its.base_record)
    flat = flatten_cores({name: weighted_sum([factors[name].R for _, factors in read], weights) for name in first})
    if config.basis_id is None:
        tensors = with_factors(str(out), {CORES: flat}, _bases_in(first))
        tensors |= trained_with(_bases_in(first), config.base_record)
    else:
        tensors = {cores_key(config.basis_id): flat}
    first_folder = Path(adapters[0])
    written = SavedAdapter.read(first_folder).write(Path(out), tensors=tensors, reads=first_folder)
    if (card := written / CARD_FILE).is_file():
        card.write_text(with_scores(card.read_text(encoding="utf-8"), {}), encoding="utf-8")  # those of the first
    return written


def _bases_in(factors: Mapping[str, Factors]) -> dict[str, ScaledBasis]:
    return {name: own.basis for name, own in factors.items()}


def require_one_basis(first: str, one: Bases, second: str, other: Bases) -> None:
    """Refuse to sum two adapters whose bases, ranks or scales differ; the first differing layer is named."""
    layer = _differing_basis(one, other)
    if layer is not None:
        raise ArtifactError(
            f"Cores are summed on one basis, but the adapters {first} and {second} differ in basis, rank or scale at "
            f"layer {layer!r}. Sum adapters that were trained on the same saved basis."
        )


def _differing_basis(one: Bases, other: Bases) -> str | None:
    """The first layer, by name, whose basis or scale differs or is missing on one side; None if all are equal."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other or one[name].scale != other[name].scale:
            return name
        for X, Y in zip(one[name][:2], other[name][:2], strict=True):
            if X.shape != Y.shape or X.dtype != Y.dtype or not torch.equal(X, Y):
                return name
    return None


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
    factors = _factors_in(adapter, tensors, config)
    if basis is None:
        basis = Path(out).parent / "basis"
        if not basis.exists():
            if config.initial_step:
                raise ArtifactError(
                    f"The cores in {adapter} began with an initial step, which no basis holds: keep it whole."
                )
            config.saved_basis(_bases_in(factors), base=config.base_record).write(basis)
    saved = load_basis(basis)
    layer = _differing_basis(_bases_in(factors), saved.layers)
    if layer is not None:
        raise ArtifactError(
            f"An adapter is packed beside its own basis, but P, Q or the scale of layer {layer!r} of {adapter} are "
            f"not those of {basis}. Name the basis that it was trained on."
        )
    require_one_base(basis, saved.base, adapter, config.base_record)
    cores = flatten_cores({name: f.R for name, f in factors.items()})
    packed = {cores_key(saved.identity): cores if dtype is None else cores.to(dtype)}
    packed |= {key: tensors[key] for key in other_keys(tensors)}
    return SavedAdapter.read(Path(adapter)).write(
        Path(out), tensors=packed, reads=Path(adapter), basis=str(basis), basis_id=saved.identity, base_record=None
    )


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
    without_basis = {"basis": None, "basis_revision": None, "basis_id": None}
    return SavedAdapter.read(Path(adapter)).write(
        Path(out), tensors=tensors, reads=Path(adapter), base_record=config.base_record, **without_basis
    )
