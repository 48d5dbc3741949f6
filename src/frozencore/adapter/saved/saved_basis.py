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
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from frozencore.adapter.saved.tensors import is_usable_float
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    BASIS_FORMAT,
    FACTORS_FILE,
    HEADER_FILE,
    basis_header,
    is_folder,
    places_of_a_basis,
)
from frozencore.files.fingerprint import fingerprint_options
from frozencore.files.hub import hub_answers, is_hub_id, why_not_given
from frozencore.files.whole_file import whole_folder
from frozencore.maths.linalg import all_finite
from frozencore.words import one_line

LARGEST_HEADER = 2**24


@dataclass(frozen=True)
class SavedBasis:
    """P and Q of every layer, and their origin.

    Attributes:
        identity: SHA-256 of the content; 64 hexadecimal digits.
        layers: P (m x r) and Q (n x r) by layer name.
        scales: s by layer name.
        options: Fields of :class:`frozencore.FrozenCoreConfig`: the constructor with its options, ranks, targets.
        calibrated_on: A description of the calibration data; None if unknown.
        base: Values of the base model's weights (:mod:`frozencore.adapter.saved.same_base`); None if unknown.
        base_model: The name of the base model.
        place, revision: The folder or hub id that the basis was read from.
    """

    identity: str
    layers: dict[str, tuple[Tensor, Tensor]]
    scales: dict[str, float]
    options: dict[str, Any]
    calibrated_on: str | None = None
    base: dict[str, str] | None = None
    base_model: str | None = None
    place: str | None = None
    revision: str | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """P and Q in the form of :func:`frozencore.set_bases`."""
        return {
            f"{name}.{side}": X for name, factors in self.layers.items() for side, X in zip("PQ", factors, strict=True)
        }


def write_basis(
    folder: Path,
    factors: Mapping[str, Tensor],
    *,
    scales: Mapping[str, float],
    options: Mapping[str, Any],
    calibrated_on: str | None,
    base: Mapping[str, str] | None,
    base_model: str | None,
    overwrite: bool = False,
) -> str:
    """Write the folder of a basis atomically.

    Args:
        factors: P and Q under ``<layer>.P`` and ``<layer>.Q``, on the CPU.

    Returns:
        The identity.
    """
    with whole_folder(folder, overwrite=overwrite) as aside:
        save_file(
            {name: X.contiguous() for name, X in factors.items()}, aside / FACTORS_FILE, metadata={"format": "pt"}
        )
        header = {
            "format": BASIS_FORMAT,
            "factors_sha256": hashlib.sha256((aside / FACTORS_FILE).read_bytes()).hexdigest(),
            "options": dict(options),
            "scales": {name: scales[name] for name in sorted(scales)},
            "calibrated_on": calibrated_on,
            "base": None if base is None else dict(base),
            "base_model": base_model,
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
    layers = {name: (tensors[f"{name}.P"], tensors[f"{name}.Q"]) for name in names}
    for name, (P, Q) in layers.items():
        plain = is_usable_float(P) and is_usable_float(Q) and P.ndim == Q.ndim == 2 and P.shape[1] == Q.shape[1] > 0
        if not plain or not len(P) or not len(Q) or not all(all_finite(X.float()) for X in (P, Q)):
            raise _damaged(place, f"P and Q of layer {name!r} are not finite matrices of one rank")
    said = {name: header[name] for name in ("scales", "options", "calibrated_on", "base", "base_model")}
    return SavedBasis(header["identity"], layers, **said, place=str(place), revision=revision)


def read_header(place: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Read ``basis.json`` and check the identity in it; raises the errors of :func:`load_basis`."""
    path = _file(place, revision, HEADER_FILE)
    try:
        if path.stat().st_size > LARGEST_HEADER:
            raise ValueError(f"{HEADER_FILE} is larger than {LARGEST_HEADER:,} bytes")
        return basis_header(str(place), path.read_text(encoding="utf-8"))
    except ArtifactError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(place, error) from error


def find_basis(
    origin: str, identity: str, *, beside: Path | None, named: str | None, revision: str | None
) -> SavedBasis:
    """Find the basis with this identity, and read it.

    Args:
        beside: The adapter's folder. First this folder and the two folders above are searched, each with its folder
            ``basis``.
        named: The folder or hub id in the configuration, searched last.
    """
    for folder in places_of_a_basis(beside):
        if (folder / HEADER_FILE).is_file() and read_header(folder)["identity"] == identity:
            return load_basis(folder)
    short = identity[:12]
    if named is None:
        raise ArtifactError(
            f"{origin} holds cores alone, on the basis {short}, which is not beside it. Get that basis folder and put "
            "it there as 'basis', or pass basis=FOLDER."
        )
    if not (is_folder(named) or is_hub_id(named)):
        raise ArtifactError(
            f"{origin} holds cores alone, on the basis {short}, which is neither beside it nor at {named[:300]}. Get "
            "that basis folder and put it beside the adapter as 'basis', or pass basis=FOLDER."
        )
    header = read_header(named, revision)
    if header["identity"] != identity:
        raise ArtifactError(
            f"{origin} holds cores on the basis {short}, but {named} is the basis {header['identity'][:12]}: on "
            "another basis they mean nothing. Get the basis that they were trained on."
        )
    return load_basis(named, revision)


def _file(place: str | Path, revision: str | None, name: str) -> Path:
    folder = Path(place)
    if is_folder(place) and (folder / name).is_file():
        return folder / name
    hub_id = str(place)
    if is_folder(place) or not is_hub_id(hub_id):
        raise ArtifactError(
            f"A basis is a folder with {HEADER_FILE} and {FACTORS_FILE}, but {str(place)[:300]} has no {name}. Point "
            "at one that save_basis or `frozencore calibrate` wrote, or at a hub id."
        )
    try:
        only_here = not hub_answers("model", hub_id)
        return Path(hf_hub_download(hub_id, name, revision=revision, local_files_only=only_here))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"No basis at {place}: it is neither a folder nor in the offline cache, and "
            f"{why_not_given(error)}. Give the folder of a saved basis."
        ) from error


def _damaged(place: str | Path, error: Exception | str) -> ArtifactError:
    return ArtifactError(f"The basis in {place} is damaged ({one_line(error, 200)}). Save or download it again.")
