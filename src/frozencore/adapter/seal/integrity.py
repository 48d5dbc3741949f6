"""Whether a saved adapter is whole, unchanged and sound; what is wrong is said in one line.

``save_pretrained`` writes a seal into ``adapter_config.json``:

    format           of the folder; a newer one is refused
    weights_sha256   of the bytes of adapter_model.safetensors
    bases_sha256     of the values of P and Q; cores_sha256: of R
    base             some values of the base model's weights (:mod:`frozencore.adapter.seal.same_base`)

Of an adapter of cores alone (format 2) bases and base model are those of the basis that its configuration names.

What a seal does not say is not checked, so adapters of earlier versions load. Where PEFT loads: a local folder is
checked by ``FrozenCoreConfig.from_pretrained``, the tensors (from a hub id too) by ``FrozenCoreModel`` when they reach
the model. transformers' own ``model.load_adapter`` passes by both; it checks format and base model only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from frozencore.adapter.seal.factors import PREFIX, Factors, layer_factors
from frozencore.adapter.seal.flat_cores import FLAT
from frozencore.adapter.seal.values import require_finite, require_finite_in, require_modules
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    CONFIG_FILE,
    PEFT_TYPE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    bytes_of,
    damaged,
    missing,
    read_config,
    read_seal,
)
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.maths.basis import ORTHONORMAL_COORDINATES, known_basis

CORES_FORMAT = 2  # of cores alone
ROUNDS_FORMAT = 3  # of several rounds, whose bases are orthonormal one by one
ORTHONORMALITY = 2 * torch.finfo(torch.bfloat16).eps  # a basis may have been bfloat16 before it was widened
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")


def read_folder(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an adapter folder of any PEFT method; of ours, checked against the seal.

    The weights are read once: what was hashed is what is returned.

    Raises:
        ArtifactError: A file is missing, no plain file, a pickle, damaged, not as sealed, or of a newer format.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ArtifactError(missing(directory, name))
    values = read_config(directory)
    content = bytes_of(directory / WEIGHTS_FILE)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise damaged(directory, error) from error
    if values.get("peft_type") != PEFT_TYPE:
        require_finite(str(directory), tensors, "Train it again, or load an earlier checkpoint.")
    else:
        seal = read_seal(str(directory), values.get("seal"))
        if FLAT in tensors:
            require_sound_cores(str(directory), tensors, values.get("basis_id"))
        else:
            require_sound(str(directory), tensors, values.get("coordinates", "qr"), values.get("rounds", 1))
        require_modules(str(directory), values.get("modules_to_save"), values.get("trainable_token_indices"), tensors)
        recorded = seal.get("weights_sha256")
        came = hashlib.sha256(content).hexdigest()
        if recorded not in (None, came):
            raise ArtifactError(
                f"{WEIGHTS_FILE} in {directory} is not the file that was saved (SHA-256 {came[:12]}, recorded "
                f"{str(recorded)[:12]!r}): changed, damaged, or just being written. Try again, or download it again."
            )
        require_sealed(str(directory), seal, tensors)
    return values, tensors


def require_loadable(directory: Path) -> None:
    """Check a local folder before PEFT reads it; one with a configuration alone passes.

    Raises:
        ArtifactError: As :func:`read_folder`.
    """
    holds_weights = (directory / WEIGHTS_FILE).exists() or (directory / WEIGHTS_FILE).is_symlink()
    if holds_weights or (directory / PICKLE_FILE).exists():
        read_folder(directory)


def seal_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The part of a seal that tensors give, whatever their keys' prefix and adapter name."""
    if FLAT in tensors:
        return {"format": CORES_FORMAT, "cores_sha256": fingerprint_tensors([("", tensors[FLAT])])}
    of_side: dict[str, list[Tensor]] = {"P": [], "Q": [], "R": []}
    for key, tensor in tensors.items():
        _, found, rest = key.partition(f".{PREFIX}")
        if found and rest[:1] in of_side:
            of_side[rest[0]].append(tensor)
    return {
        "format": 1,
        "bases_sha256": _hash_of(*(_tensor_hashes(of_side[side]) for side in "PQ")),
        "cores_sha256": _hash_of(_tensor_hashes(of_side["R"])),
    }


def require_sealed(origin: str, seal: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the seal.

    Raises:
        ArtifactError: Bases or cores are others.
    """
    wanted = {name: seal[name] for name in ("bases_sha256", "cores_sha256") if seal.get(name) is not None}
    came = seal_tensors(tensors) if wanted else {}
    for name, recorded in wanted.items():
        if came.get(name) != recorded:
            raise ArtifactError(
                f"The {name.partition('_')[0]} in {origin} are not those that were saved (hash "
                f"{str(came.get(name))[:12]}, "
                f"recorded {str(recorded)[:12]!r}): changed, damaged, or just being written. Load it again."
            )


def require_sound(origin: str, tensors: Mapping[str, Tensor], coordinates: Any, rounds: Any = 1) -> dict[str, Factors]:
    """The factors by layer, if every tensor is finite, named like a module, and bases are orthonormal where promised.

    Args:
        rounds: How many bases stand side by side in P and Q.

    Raises:
        ArtifactError: Otherwise. Bases that are all zero are those of an adapter that was never calibrated.
    """
    _require_names(origin, tensors)
    factors = layer_factors(origin, tensors)
    require_finite(origin, tensors, "Train it again, or load an earlier checkpoint.")
    for layer, f in factors.items():
        k = f.P.shape[1]
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1 or k % rounds:
            raise ArtifactError(
                f"Layer {layer!r} of {origin} has {k} columns for {rounds!r:.20} rounds. Save or download it again."
            )
    blocks = {layer: [X.chunk(rounds, dim=1) for X in (f.P, f.Q)] for layer, f in factors.items()}
    for j in range(rounds):
        require_orthonormal(origin, {layer: (P[j], Q[j]) for layer, (P, Q) in blocks.items()}, coordinates)
    return factors


def require_orthonormal(origin: str, bases: Mapping[str, tuple[Tensor, Tensor]], coordinates: Any) -> None:
    """Refuse P and Q that are not orthonormal where their coordinates promise it; all of them zero are none yet.

    Raises:
        ArtifactError: The first layer.
    """
    promised = isinstance(coordinates, str) and coordinates in ORTHONORMAL_COORDINATES
    if promised and any(bool(P.any()) or bool(Q.any()) for P, Q in bases.values()):
        for layer, (P, Q) in bases.items():
            error = known_basis(P, Q).orthonormality_error()
            if not error <= ORTHONORMALITY:
                raise ArtifactError(
                    f"With coordinates={coordinates!r} a basis is orthonormal, but that of layer {layer!r} of {origin} "
                    f"is off by {error:.2g}. Save or download it again."
                )


def require_sound_cores(origin: str, tensors: Mapping[str, Tensor], basis_id: Any) -> None:
    """The same of an adapter of cores alone, whose basis may be elsewhere.

    Raises:
        ArtifactError: A tensor is not finite or not named like a module, or no basis is named.
    """
    _require_names(origin, tensors)
    if not isinstance(basis_id, str):
        raise ArtifactError(f"{origin} holds cores alone and does not say on which basis. Save or download it again.")
    require_finite(origin, tensors, "Train it again, or load an earlier checkpoint.")


def _require_names(origin: str, tensors: Mapping[str, Tensor]) -> None:
    odd = next((key for key in tensors if not _NAME.fullmatch(key) or ".." in key), None)
    if odd is not None:
        raise ArtifactError(f"A tensor is named like a module, but {origin} holds {odd[:80]!r}. Do not use this file.")


def require_fit(origin: str, layers: Mapping[str, tuple[Tensor, Tensor, Tensor]], came: Mapping[str, Factors]) -> None:
    """Refuse factors of other layers or shapes than a model has.

    Args:
        layers: The model's own P, Q and R by layer.

    Raises:
        ArtifactError: The first layer that only one of them has, or whose shapes differ.
    """
    for odd, what in (
        (came.keys() - layers.keys(), "the base model lacks"),
        (layers.keys() - came.keys(), "it has nothing for"),
    ):
        if odd:
            raise ArtifactError(
                f"An adapter fits its base model layer by layer, but {what} {len(odd)} of the layers of {origin} "
                f"(first: {min(odd)!r}). Load the base model that it was trained on."
            )
    for name, own in layers.items():
        theirs = (came[name].P, came[name].Q, came[name].R)
        for mine, other in zip(own, theirs, strict=True):
            require_finite_in(f"layer {name!r} of {origin}", other, mine.dtype)
        if any(mine.shape != other.shape for mine, other in zip(own, theirs, strict=True)):
            m, n, r = own[0].shape[0], own[1].shape[0], own[2].shape[0]
            raise ArtifactError(
                f"Layer {name!r} is {m} x {n} at rank {r} in this model, but P {tuple(theirs[0].shape)} and Q "
                f"{tuple(theirs[1].shape)} came with {origin}. Load the base model that it was trained on."
            )


def _tensor_hashes(tensors: Iterable[Tensor]) -> list[str]:
    """Without names, sorted: transformers may rename layers on loading."""
    return sorted(fingerprint_tensors([("", tensor)]) for tensor in tensors)


def _hash_of(*parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
