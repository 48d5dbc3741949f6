"""Adapters and bases in which nothing is wrong, told without torch and PEFT, whose import takes seconds.

The bytes are hashed and held against the seal, and the values looked at with numpy. Where that is not all there is to
say, of anything unusual or unsound, the thorough look (:mod:`frozencore.cli.adapter_findings`) is taken instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from frozencore.adapter_folder import (
    CONFIG_FILE,
    FACTORS_FILE,
    HEADER_FILE,
    PEFT_TYPE,
    WEIGHTS_FILE,
    basis_header,
    places_of_a_basis,
    read_config,
    read_seal,
)
from frozencore.cli.adapter_lines import SeenAdapter, SeenBasis, other_method
from frozencore.cli.findings import Finding, inside
from frozencore.cli.plain_settings import are_plain
from frozencore.errors import FrozenCoreError
from frozencore.lab.run.files import ADAPTER, BASIS
from frozencore.maths.basis import ORTHONORMAL_COORDINATES

StoredArray = np.ndarray[Any, np.dtype[Any]]
ORTHONORMALITY = 1e-3  # of float32 bases; coarser ones may be as they must, which torch tells
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_CORES, _FACTOR, _BASE = "frozencore_cores", ".frozencore_", "base_model.model."
_TO_TORCH = (
    FrozenCoreError, SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
    OverflowError,
)  # fmt: skip


class NotPlainError(ValueError):
    """Something that a glance does not settle."""


def adapter(path: Path) -> Iterator[Finding]:
    """Of a folder with a frozen core, or with one in its folder ``adapter``."""
    if not (path / CONFIG_FILE).exists() and (path / ADAPTER / CONFIG_FILE).is_file():
        yield from beside(path)
        return
    try:
        found = list(_seen_adapter(path).findings())
    except _TO_TORCH:
        from frozencore.cli import adapter_findings

        found = list(adapter_findings.adapter(path))
    yield from found


def beside(path: Path) -> Iterator[Finding]:
    """The adapter and the basis in a folder of ``frozencore calibrate``."""
    yield from inside(path / ADAPTER, ADAPTER, adapter)
    if (path / BASIS).is_dir():
        yield from inside(path / BASIS, BASIS, basis)


def basis(path: Path) -> Iterator[Finding]:
    """Of a folder with a basis of its own."""
    try:
        header, layers = _read_basis(path)
        found = list(
            SeenBasis(
                len(layers), header["identity"], header["options"].get("constructor"), header["calibrated_on"],
                header["base_model"], bool(header["base"]),
            ).findings()
        )  # fmt: skip
    except _TO_TORCH:
        from frozencore.cli import adapter_findings

        found = list(adapter_findings.basis(path))
    yield from found


def baseline(path: Path) -> Iterator[Finding]:
    """Of a folder with the adapter of another method."""
    try:
        values = read_config(path)
        if values.get("peft_type") == PEFT_TYPE:
            raise NotPlainError
        found = [other_method(values.get("peft_type"), len(_arrays(_bytes(path / WEIGHTS_FILE))))]
    except _TO_TORCH:
        from frozencore.cli import adapter_findings

        found = list(adapter_findings.baseline(path))
    yield from found


def _seen_adapter(path: Path) -> SeenAdapter:
    values = read_config(path)
    seal = read_seal(str(path), values.get("seal"))
    if values.get("peft_type") != PEFT_TYPE or not are_plain(values):
        raise NotPlainError
    content = _bytes(path / WEIGHTS_FILE)
    if _sha256(content) != seal["weights_sha256"]:
        raise NotPlainError
    tensors, coordinates = _arrays(content), values["coordinates"]
    if _CORES in tensors:
        _require_sealed(seal, {"cores_sha256": fingerprint_array(tensors[_CORES])})
        num_layers, num_values = _count_cores(path, values, tensors)
        calibrated = True
    else:
        layers = _layers(tensors)
        _require_sealed(seal, {"bases_sha256": _fingerprint(layers, "PQ"), "cores_sha256": _fingerprint(layers, "R")})
        calibrated = any(parts["P"].any() for parts in layers.values())
        for parts in layers.values():
            _require_factors(parts, orthonormal=calibrated and coordinates in ORTHONORMAL_COORDINATES)
        num_layers, num_values = len(layers), sum(parts["R"].size for parts in layers.values())
    return SeenAdapter(
        num_layers, num_values, values["constructor"], coordinates, calibrated, True, values.get("basis_id"),
        values["base_model_name_or_path"], bool(seal.get("base")),
    )  # fmt: skip


def _require_sealed(seal: Mapping[str, Any], came: Mapping[str, str]) -> None:
    if any(seal.get(name) not in (None, value) for name, value in came.items()):
        raise NotPlainError


def _count_cores(path: Path, values: Mapping[str, Any], tensors: Mapping[str, StoredArray]) -> tuple[int, int]:
    """Layers and values of an adapter of cores alone, whose basis is near."""
    for place in places_of_a_basis(path):
        if (place / HEADER_FILE).is_file():
            header, layers = _read_basis(place)
            if header["identity"] == values["basis_id"]:
                num_values = sum(P.shape[1] ** 2 for P, _ in layers.values())
                if tensors.keys() != {_CORES} or tensors[_CORES].shape != (num_values,):
                    raise NotPlainError
                return len(layers), num_values
    raise NotPlainError


def _read_basis(path: Path) -> tuple[dict[str, Any], dict[str, tuple[StoredArray, StoredArray]]]:
    """Header, and P and Q by layer."""
    header = basis_header(str(path), _bytes(path / HEADER_FILE).decode())
    content = _bytes(path / FACTORS_FILE)
    tensors = _arrays(content)
    names = header["scales"].keys()
    if _sha256(content) != header["factors_sha256"] or len(tensors) != 2 * len(names):
        raise NotPlainError
    layers = {name: (tensors[f"{name}.P"], tensors[f"{name}.Q"]) for name in names}
    for P, Q in layers.values():
        if P.ndim != 2 or Q.ndim != 2 or not P.shape[1] == Q.shape[1] > 0:
            raise NotPlainError
    return header, layers


def _layers(tensors: Mapping[str, StoredArray]) -> dict[str, dict[str, StoredArray]]:
    """P, Q and R by layer; nothing else is there."""
    layers: dict[str, dict[str, StoredArray]] = {}
    for key, tensor in tensors.items():
        layer, found, rest = key.removeprefix(_BASE).partition(_FACTOR)
        if not found or not layer.replace(".", "").replace("_", "").isalnum() or ".." in layer:
            raise NotPlainError
        layers.setdefault(layer, {})[rest.removesuffix(".weight")] = tensor
    if not layers or any(parts.keys() != {"P", "Q", "R"} for parts in layers.values()):
        raise NotPlainError
    return layers


def _require_factors(parts: Mapping[str, StoredArray], *, orthonormal: bool) -> None:
    P, Q, R = parts["P"], parts["Q"], parts["R"]
    if not P.ndim == Q.ndim == R.ndim == 2 or not P.shape[1] == Q.shape[1] == R.shape[0] == R.shape[1] > 0:
        raise NotPlainError
    for X in (P, Q) if orthonormal else ():
        if not np.abs(X.T.astype(np.float64) @ X - np.eye(X.shape[1])).max() <= ORTHONORMALITY:
            raise NotPlainError


def _fingerprint(layers: Mapping[str, Mapping[str, StoredArray]], sides: str) -> str:
    hashes = [sorted(fingerprint_array(parts[side]) for parts in layers.values()) for side in sides]
    return _sha256(json.dumps(hashes).encode())


def fingerprint_array(array: StoredArray) -> str:
    """As :func:`frozencore.fingerprint.fingerprint_tensors` of one tensor without a name."""
    return _sha256(f"|torch.{array.dtype.name}|{array.shape}|".encode() + array.tobytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bytes(path: Path) -> bytes:
    if not path.is_file():  # opening a pipe would wait
        raise NotPlainError
    return path.read_bytes()


def _arrays(content: bytes) -> dict[str, StoredArray]:
    """The tensors of a safetensors file, all of them finite floats that numpy knows."""
    arrays = {
        name: np.frombuffer(held["data"], dtype=_FLOATS[held["dtype"]]).reshape(held["shape"])
        for name, held in deserialize(content)
    }
    if not arrays or not all(map(_is_finite, arrays.values())):
        raise NotPlainError
    return arrays


def _is_finite(array: StoredArray) -> bool:
    """Whether values are finite as float32, in which cores are computed."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(array.astype(np.float32) if array.dtype.itemsize > 4 else array).all())
