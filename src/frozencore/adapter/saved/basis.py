"""A basis that many adapters share, in a folder of its own.

    basis.safetensors   ``<layer>.P`` (m x r) and ``<layer>.Q`` (n x r)
    basis.json          options, scales, calibration data, values of the base model, and the identity

The identity is the SHA-256 of everything else in the two files. Adapters of cores only name their basis by it, so the
folder may be anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    FACTORS_FILE,
    HEADER_FILE,
    LARGEST_CONFIG,
    folder_of,
    forbidden_in,
    is_folder,
)
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.fingerprint import fingerprint_options, fingerprint_tensors
from frozencore.files.hub import is_hub_id
from frozencore.files.lfs_pointer import lfs_pointer_in
from frozencore.maths.linalg import all_finite
from frozencore.text import one_line

FORMAT = 1
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


class ScaledBasis(NamedTuple):
    """P (m x r), Q (n x r) and the scale s of one layer."""

    P: Tensor
    Q: Tensor
    scale: float

    def to(self, dtype: torch.dtype) -> ScaledBasis:
        """The same basis in the dtype of a model."""
        return ScaledBasis(self.P.to(dtype), self.Q.to(dtype), self.scale)

    @property
    def moment(self) -> tuple[object, ...]:
        """Values that differ once P, Q or s was replaced or changed in place; inference tensors count no changes."""
        versions = (0 if X.is_inference() else X._version for X in (self.P, self.Q))
        return id(self.P), id(self.Q), self.P.data_ptr(), self.Q.data_ptr(), *versions, self.scale

    @property
    def sha256(self) -> str:
        """The hash of P and Q."""
        return fingerprint_tensors((("P", self.P), ("Q", self.Q)))


Bases = Mapping[str, ScaledBasis]
"""The bases of an adapter by layer name."""


class BasisOrigin(NamedTuple):
    """The saved basis that P and Q of a layer are of, and what they were then, to find whether they still are.

    Attributes:
        identity: The identity of the saved basis.
        sha256, moment: Those of :class:`ScaledBasis`, in the dtype of the model.
    """

    identity: str
    sha256: str
    moment: tuple[object, ...]


def holds(own: ScaledBasis, P: Tensor, Q: Tensor) -> bool:
    """Return whether P and Q, in the dtype of a loaded layer, are its own; one without values (meta) may be."""
    pairs = (own.P, P), (own.Q, Q)
    same_shapes = all(mine.shape == theirs.shape for mine, theirs in pairs)
    return same_shapes and all(
        mine.is_meta or torch.equal(mine, theirs.to(mine.device, mine.dtype)) for mine, theirs in pairs
    )


@dataclass(frozen=True)
class SavedBasis:
    """The bases of a model's layers, and their origin.

    Attributes:
        layers: P (m x r), Q (n x r) and s by layer name.
        options: Fields of :class:`frozencore.FrozenCoreConfig`: the constructor with its options, ranks, targets.
        calibrated_on: A description of the calibration data; None if unknown.
        base: The record of the base model (``record_base``); None if unknown.
        base_model: The name of the base model.
        identity: SHA-256 of the content, 64 hexadecimal digits; empty if it was not read from a folder.
        place, revision: The folder or hub id that the basis was read from.
    """

    layers: Bases
    options: Mapping[str, Any]
    calibrated_on: str | None = None
    base: dict[str, str] | None = None
    base_model: str | None = None
    identity: str = ""
    place: str | None = None
    revision: str | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """P and Q in the form of :func:`frozencore.set_bases`."""
        return {f"{name}.{side}": X for name, (P, Q, _) in self.layers.items() for side, X in (("P", P), ("Q", Q))}

    def write(self, folder: Path, *, overwrite: bool = False) -> str:
        """Write the folder of a basis atomically; returns its identity."""
        with atomic_folder(folder, overwrite=overwrite) as aside:
            tensors = {name: X.detach().cpu().contiguous() for name, X in self.tensors.items()}
            save_file(tensors, aside / FACTORS_FILE, metadata={"format": "pt"})
            header = {
                "format": FORMAT,
                "factors_sha256": hashlib.sha256((aside / FACTORS_FILE).read_bytes()).hexdigest(),
                "options": dict(self.options),
                "scales": {name: self.layers[name].scale for name in sorted(self.layers)},
                "calibrated_on": self.calibrated_on,
                "base": None if self.base is None else dict(self.base),
                "base_model": self.base_model,
            }
            identity = fingerprint_options(header)
            text = json.dumps({"identity": identity, **header}, indent=1, ensure_ascii=False)
            (aside / HEADER_FILE).write_text(text + "\n", encoding="utf-8")
        return identity


def load_basis(place: str | Path, revision: str | None = None) -> SavedBasis:
    """Read a basis that :func:`frozencore.save_basis` wrote.

    Args:
        place: A folder, or a hub id.
        revision: The revision of the hub id.

    Raises:
        ArtifactError: There is no basis, it is damaged or changed, or it has a newer format.
    """
    header = read_header(place, revision)
    path = _file(place, revision, FACTORS_FILE)
    try:
        content = path.read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise _damaged(place, error) from error
    if hashlib.sha256(content).hexdigest() != header["factors_sha256"]:
        raise _damaged(place, f"{FACTORS_FILE} is not the file that {HEADER_FILE} was written for")
    names = sorted(header["scales"])
    if tensors.keys() != {f"{name}.{side}" for name in names for side in "PQ"}:
        raise _damaged(place, f"{FACTORS_FILE} has other layers than {HEADER_FILE}")
    layers = {name: ScaledBasis(tensors[f"{name}.P"], tensors[f"{name}.Q"], header["scales"][name]) for name in names}
    for name, (P, Q, _) in layers.items():
        plain = is_usable_float(P) and is_usable_float(Q) and P.ndim == Q.ndim == 2 and P.shape[1] == Q.shape[1] > 0
        if not plain or not len(P) or not len(Q) or not all(all_finite(X.float()) for X in (P, Q)):
            raise _damaged(place, f"P and Q of layer {name!r} are not finite matrices of one rank")
    fields = {name: header[name] for name in ("options", "calibrated_on", "base", "base_model", "identity")}
    return SavedBasis(layers, **fields, place=str(place), revision=revision)


def read_header(place: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Read ``basis.json`` and check the identity in it; raises the errors of :func:`load_basis`."""
    path = _file(place, revision, HEADER_FILE)
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"{HEADER_FILE} is larger than {LARGEST_CONFIG:,} bytes")
        header = dict(json.loads(path.read_text(encoding="utf-8")))
        _require_sound(place, header)
        return header
    except ArtifactError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(place, error) from error


def _require_sound(place: str | Path, header: Mapping[str, Any]) -> None:
    """Check the format, the identity and the types of a header."""
    number = header["format"]
    if isinstance(number, int) and number > FORMAT:
        raise ArtifactError(
            f"The basis in {place} has format {number}, and this frozencore reads up to {FORMAT}. "
            "Run: pip install -U frozencore"
        )
    if fingerprint_options({key: value for key, value in header.items() if key != "identity"}) != header["identity"]:
        raise ValueError(f"{HEADER_FILE} was changed since it was written")
    scales, base = header["scales"], header["base"]
    fine = (
        isinstance(scales, dict) and scales and isinstance(header["options"], dict)
        and all(type(s) in (int, float) and abs(s) <= LARGEST_FLOAT32 for s in scales.values())
        and (base is None or isinstance(base, dict))
        and all(isinstance(header[name], str | None) for name in ("calibrated_on", "base_model"))
    )  # fmt: skip
    if not fine:
        raise ValueError(f"{HEADER_FILE} holds a value of a wrong type")


def basis_beside(identity: str, folder: Path) -> Path | None:
    """Find the basis with this identity: in an adapter's folder, the two above it, and the folder ``basis`` of each."""
    for parent in (folder, *folder.absolute().parents[:2]):
        for place in (parent / "basis", parent):
            if (place / HEADER_FILE).is_file() and read_header(place)["identity"] == identity:
                return place
    return None


def load_named_basis(origin: str, identity: str, place: str | None, revision: str | None) -> SavedBasis:
    """Read the basis that an adapter names.

    Args:
        place: Its folder or hub id; None if it is unknown.

    Raises:
        ArtifactError: It is not there, or has another identity.
    """
    if place is None or not (is_folder(place) or is_hub_id(place)):
        nor = "" if place is None else f" or at {place[:300]}"
        raise ArtifactError(
            f"{origin} holds cores alone, on the basis {identity[:12]}, which is not beside it{nor}. Get that basis "
            "folder and put it beside the adapter as 'basis', or pass basis=FOLDER."
        )
    theirs = read_header(place, revision)["identity"]
    if theirs != identity:
        raise ArtifactError(
            f"{origin} holds cores on the basis {identity[:12]}, but {place} is the basis {theirs[:12]}: on "
            "another basis they mean nothing. Get the basis that they were trained on."
        )
    return load_basis(place, revision)


def _file(place: str | Path, revision: str | None, name: str) -> Path:
    may_exist = is_folder(place) or is_hub_id(str(place))
    if not may_exist or not (file := folder_of(str(place), revision) / name).is_file():
        raise ArtifactError(
            f"A basis is a folder with {HEADER_FILE} and {FACTORS_FILE}, but {str(place)[:300]} has no {name}. Point "
            "at one that save_basis or `frozencore calibrate` wrote, or at a hub id."
        )
    return file


def _damaged(place: str | Path, error: Exception | str) -> ArtifactError:
    if (forbidden := forbidden_in(Path(place))) is not None:
        return forbidden
    if pointer := lfs_pointer_in(Path(place)):
        return ArtifactError(f"The basis in {place} is not whole: {pointer}")
    return ArtifactError(f"The basis in {place} is damaged ({one_line(error, 200)}). Save or download it again.")


def is_usable_float(tensor: Tensor) -> bool:
    """Return whether torch can compute with a tensor's floats; 8-bit floats can only be stored."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1
