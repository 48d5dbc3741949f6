"""A basis: P, Q and the scale of every adapted layer of a model, and the id by which all else names it.

    basis.safetensors   ``<layer>.P`` (m x r) and ``<layer>.Q`` (n x r)
    basis.json          the id, the scales, the record of the base model, and the options that made P and Q

The id is a hash of P, Q, the scales and the record of the base model: of all that gives a core its meaning. Two cores
with one basis id have the same layers, ranks, scales and base model. Values count as bfloat16 rounds them, so that a
basis has one id in float32 and in a bfloat16 model. An adapter whose basis has no folder stores P and Q beside its core
(:mod:`frozencore.adapter.folders`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from frozencore.adapter.base_record import base_digest
from frozencore.errors import ArtifactError, CalibrationError
from frozencore.files.adapter_folder import damaged, folder_of, is_folder, require_header
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.files.hub import is_hub_id
from frozencore.files.names import BASIS, FACTORS_FILE, HEADER_FILE
from frozencore.maths.basis import LayerBasis, known_basis
from frozencore.options import fingerprint_options

ID_DIGITS = 32


@dataclass(frozen=True)
class BasisHeader:
    """``basis.json``: all of a basis but P and Q; the fields are those of :class:`Basis`."""

    id: str
    base_model: str | None
    calibrated_on: str | None
    options: Mapping[str, Any]
    scales: Mapping[str, float]
    base: Mapping[str, str] | None


@dataclass(frozen=True, eq=False)
class Basis:
    """The frozen part of adapters: one for all cores that are trained on it.

    Attributes:
        layers: P (m x r), Q (n x r) and s by layer name.
        options: Fields of :class:`frozencore.FrozenCoreConfig`: the constructor with its options, ranks, targets.
        base: The record of the base model (``record_base``); None if it has no plain weights.
        base_model: The name of the base model.
        calibrated_on: A description of the calibration data.
        place, revision: The folder or hub id that the basis was read from.
        id: 32 hexadecimal digits of the SHA-256 of P, Q, the scales and ``base``.
        digests: The hash of P, Q and s of each layer (:func:`layer_digest`); the id is computed from these.
    """

    layers: Mapping[str, LayerBasis]
    options: Mapping[str, Any]
    base: Mapping[str, str] | None = None
    base_model: str | None = None
    calibrated_on: str | None = None
    place: str | None = None
    revision: str | None = None
    id: str = field(init=False)
    digests: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        digests = {name: layer_digest(self.layers[name]) for name in sorted(self.layers)}
        object.__setattr__(self, "digests", digests)
        content = {"layers": digests, "base": None if self.base is None else base_digest(self.base)}
        object.__setattr__(self, "id", fingerprint_options(content)[:ID_DIGITS])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """P and Q by their names in ``basis.safetensors``, in the order of the layers' names."""
        layers = ((name, self.layers[name]) for name in sorted(self.layers))
        return {f"{name}.{side}": X for name, layer in layers for side, X in (("P", layer.P), ("Q", layer.Q))}

    @property
    def scales(self) -> dict[str, float]:
        """s by layer name."""
        return {name: self.layers[name].scale for name in sorted(self.layers)}

    @property
    def ranks(self) -> dict[str, int]:
        """r by layer name, in the order of a core's values."""
        return ranks_of(self.layers)

    @property
    def is_set(self) -> bool:
        """Whether P and Q were set."""
        return are_set(self.layers)

    def write(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write the folder of the basis atomically."""
        with atomic_folder(folder, overwrite=overwrite) as aside:
            tensors = {name: X.detach().cpu().contiguous() for name, X in self.tensors.items()}
            save_file(tensors, aside / FACTORS_FILE, metadata={"format": "pt"})
            header = BasisHeader(
                self.id, self.base_model, self.calibrated_on, dict(self.options), self.scales, self.base
            )
            text = json.dumps(vars(header), indent=1, ensure_ascii=False)
            (aside / HEADER_FILE).write_text(text + "\n", encoding="utf-8")


def ranks_of(layers: Mapping[str, LayerBasis]) -> dict[str, int]:
    """r by layer name, in the order of a core's values."""
    return {name: layers[name].rank for name in sorted(layers)}


def are_set(layers: Mapping[str, LayerBasis]) -> bool:
    """Whether P and Q were set: they are zero in all layers of an adapter that was never calibrated."""
    return any(layer.is_set for layer in list(layers.values())[:1])


def require_set(layers: Mapping[str, LayerBasis]) -> None:
    """Refuse layers whose basis is zero: it was never set."""
    if empty := [name for name, basis in layers.items() if not basis.is_set]:
        raise CalibrationError(
            f"A frozen core needs a basis, but layer {empty[0]!r} has none. Call "
            "frozencore.calibrate(model, dataloader) first."
        )


def layer_digest(basis: LayerBasis) -> str:
    """SHA-256 of P and Q of a layer, as bfloat16 rounds them, and of its scale."""
    factors = (("P", basis.P.bfloat16()), (f"Q at scale {basis.scale}", basis.Q.bfloat16()))
    return fingerprint_tensors(factors)


def load_basis(place: str | Path, revision: str | None = None) -> Basis:
    """Read a basis that :func:`frozencore.save_basis` or ``frozencore calibrate`` wrote.

    Args:
        place: A folder, or a hub id.
        revision: The revision of the hub id.

    Raises:
        ArtifactError: There is no basis, or its id does not fit P, Q, the scales and the record of the base model.
    """
    folder = _folder(place, revision)
    header = _header_in(folder, place)
    with _reading(place):
        tensors = load_file(folder / FACTORS_FILE)
        basis = Basis(
            {name: known_basis(tensors[f"{name}.P"], tensors[f"{name}.Q"], s) for name, s in header.scales.items()},
            options=header.options,
            base=header.base,
            base_model=header.base_model,
            calibrated_on=header.calibrated_on,
            place=str(place),
            revision=revision,
        )
        if basis.id != header.id:
            raise ValueError(f"its content gives the id {basis.id}, and {HEADER_FILE} names {header.id}")
    return basis


def read_header(place: str | Path, revision: str | None = None) -> BasisHeader:
    """Read ``basis.json``. Raises the errors of :func:`load_basis`."""
    return _header_in(_folder(place, revision), place)


def _header_in(folder: Path, place: str | Path) -> BasisHeader:
    with _reading(place):
        values = dict(json.loads((folder / HEADER_FILE).read_text(encoding="utf-8")))
        names = [field.name for field in fields(BasisHeader)]
        if absent := [name for name in names if name not in values]:  # as in a basis of an earlier version
            raise ValueError(f"{HEADER_FILE} names no {absent[0]}")
        return BasisHeader(**{name: values[name] for name in names})


def basis_beside(basis_id: str, folder: Path) -> Path | None:
    """Find a basis by its id: in an adapter's folder, the two above it, and the folder ``basis`` of each."""
    for parent in (folder, *folder.absolute().parents[:2]):
        for place in (parent / BASIS, parent):
            with suppress(ArtifactError):  # damaged, or of an earlier version: then it is not this one
                if (place / HEADER_FILE).is_file() and read_header(place).id == basis_id:
                    return place
    return None


def find_basis(origin: str, basis_id: str, place: str | None, revision: str | None = None) -> Basis:
    """Read the basis of a core.

    Args:
        origin: The core, as the beginning of a sentence.
        place: The folder or hub id of the basis; None if it is unknown.

    Raises:
        ArtifactError: It is not there, or has another id.
    """
    if place is None or not (is_folder(place) or is_hub_id(place)):
        nor = "" if place is None else f" or at {place}"
        raise ArtifactError(
            f"{origin} has a core on the basis {basis_id}, which is not beside it{nor}. Get that basis folder and put "
            "it beside the adapter as 'basis', or pass basis=FOLDER."
        )
    try:
        basis = load_basis(place, revision)
    except ArtifactError as error:
        raise ArtifactError(f"{origin} has a core on the basis {basis_id}, which cannot be read: {error}") from error
    require_same_id(origin, basis_id, f"{place} is", basis.id)
    return basis


def require_same_id(origin: str, basis_id: str, other: str, other_id: str | None) -> None:
    """Refuse a core on another basis than the one that it was trained on.

    Args:
        origin: The core, as the beginning of a sentence.
        other: The other basis with a verb: ``"the model has"``.
    """
    if other_id != basis_id:
        raise ArtifactError(
            f"{origin} has a core on the basis {basis_id}, but {other} {other_id or 'none that has an id'}. A core "
            "works on one basis only, with its layers, ranks, scales and base model. Use the basis that it was "
            "trained on."
        )


def _folder(place: str | Path, revision: str | None) -> Path:
    folder = folder_of(str(place), revision)
    require_header(folder)
    return folder


@contextmanager
def _reading(place: str | Path) -> Iterator[None]:
    """Name the basis in the error of a file that cannot be read."""
    try:
        yield
    except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
        raise damaged(place, error, "basis") from error
