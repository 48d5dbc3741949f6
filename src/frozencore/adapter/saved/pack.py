"""Packing a saved adapter into cores alone beside a named basis, and unpacking it: the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from frozencore.adapter.config import FrozenCoreConfig, options_of_basis
from frozencore.adapter.saved.adapter_sums import bases_of_folder, differing_basis
from frozencore.adapter.saved.card import num_tokens
from frozencore.adapter.saved.folder import read_tensors, write_adapter
from frozencore.adapter.saved.saved_basis import SavedBasis, load_basis, write_basis
from frozencore.adapter.saved.tensors import FLAT, PREFIX, Factors, flatten_cores, layer_factors
from frozencore.errors import ArtifactError


def pack_adapter(
    adapter: str | Path, basis: str | Path | None, out: str | Path, *, dtype: torch.dtype | None = None
) -> Path:
    """Write an adapter that holds its basis as cores alone.

    Args:
        adapter: Folder of an adapter whose P and Q are those of the basis, bit for bit.
        basis: Folder of the basis, or a hub id. None: the folder ``basis`` beside ``out``, which is written from the
            adapter if it is not there.
        out: New folder.
        dtype: The dtype of the cores; by default the saved one. Cores in 16 bits are rounded.

    Raises:
        ArtifactError: The adapter has another basis, is on a named one already, or a folder cannot be read or written.
    """
    config, tensors = read_tensors(adapter)
    if config.basis_id is not None:
        raise ArtifactError(f"{adapter} holds cores alone already, on the basis {config.basis_id[:12]}.")
    config.require_one_round("Packing")
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
    packed = {FLAT: cores if dtype is None else cores.to(dtype), **others}
    return write_adapter(Path(out), packed, like=Path(adapter), changes=changes)


def unpack_adapter(adapter: str | Path, out: str | Path, *, basis: str | Path | None = None) -> Path:
    """Write an adapter of cores alone as one that holds everything.

    Args:
        adapter: Folder of an adapter of cores alone.
        out: New folder.
        basis: Its basis, if not in the folder, beside it or where it says.

    Raises:
        ArtifactError: It holds its basis already, the basis is not found, or a folder cannot be read or written.
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
