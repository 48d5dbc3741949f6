"""The seal of a saved adapter: hashes that show whether it is complete and unchanged.

``save_pretrained`` writes a seal into ``adapter_config.json``:

    format           of the folder; a newer one is refused
    weights_sha256   of the bytes of adapter_model.safetensors
    bases_sha256     of the values of P and Q; cores_sha256: of R
    base             some values of the base model's weights (:mod:`frozencore.adapter.saved.same_base`)

For an adapter of cores only (format 2), bases and base model are in the named basis. A missing field is not checked.

``FrozenCoreConfig.from_pretrained`` checks a local folder. ``FrozenCoreModel`` checks the tensors before they enter the
model, also from a hub id. transformers' own ``model.load_adapter`` uses neither; then only format and base model are
checked.
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

from frozencore.adapter.saved.tensors import FLAT, PREFIX, Factors, layer_factors, require_finite
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
from frozencore.files.whole_file import allow_as_umask
from frozencore.maths.basis import ORTHONORMAL_COORDINATES, known_basis

CORES_FORMAT = 2  # cores only
ORTHONORMALITY = 2 * torch.finfo(torch.bfloat16).eps  # a basis may have been rounded to bfloat16 before
CLASSIFIERS = ("classifier", "score")  # PEFT lists both for every classifier, which has one of them
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")
_TRAIN_AGAIN = "Train it again, or load an earlier checkpoint."


def read_folder(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the configuration and tensors of an adapter of any PEFT method; check a frozen core against its seal.

    The weights are read once, so the hashed bytes are the returned bytes.
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
    origin = str(directory)
    if values.get("peft_type") != PEFT_TYPE:
        require_finite(origin, tensors, _TRAIN_AGAIN)
        return values, tensors
    refuse_gone(origin, values)
    seal = read_seal(origin, values.get("seal"))
    if FLAT in tensors:
        require_sound_cores(origin, tensors, values.get("basis_id"))
    else:
        require_sound(origin, tensors, values.get("coordinates", "qr"))
    require_modules(origin, values.get("modules_to_save"), values.get("trainable_token_indices"), tensors)
    recorded, came = seal.get("weights_sha256"), hashlib.sha256(content).hexdigest()
    if recorded not in (None, came):
        raise ArtifactError(
            f"{WEIGHTS_FILE} in {directory} is not the file that was saved (SHA-256 {came[:12]}, recorded "
            f"{str(recorded)[:12]!r}): changed, damaged, or just being written. Try again, or download it again."
        )
    require_sealed(origin, seal, tensors)
    return values, tensors


def refuse_gone(origin: str, values: Mapping[str, Any]) -> None:
    """Refuse the options of earlier versions: rounds, a basis that grew, and a rank budget without ranks yet."""
    if values.get("scale_rank") is not None:
        raise ArtifactError(
            f"An adapter's scale is alpha over its rank, but that in {origin} is on a basis that grew from rank "
            f"{values['scale_rank']!r:.20}, which this version does not read. Export it as a LoRA with frozencore 0.1."
        )
    if values.get("rank_budget") is not None and not values.get("rank_pattern"):
        raise ArtifactError(
            f"A rank or a rank_pattern gives the ranks, but {origin} has rank_budget={values['rank_budget']!r:.30} and "
            "no ranks yet, which this version does not read. Calibrate with r=... or rank_pattern={...}."
        )
    if values.get("rounds", 1) != 1:
        raise ArtifactError(
            f"An adapter has one basis, but that in {origin} is a sum of rounds={values['rounds']!r:.20}, each on a "
            "basis of its own, which this version does not read. Export it as a LoRA with frozencore 0.1."
        )


def require_loadable(directory: Path) -> None:
    """Check a local folder before PEFT reads it; a folder with only a configuration passes."""
    holds_weights = (directory / WEIGHTS_FILE).exists() or (directory / WEIGHTS_FILE).is_symlink()
    if holds_weights or (directory / PICKLE_FILE).exists():
        read_folder(directory)


def seal_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Hash the factors; prefixes of keys and adapter names do not matter."""
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


def seal_file(path: Path, seal: dict[str, Any] | None) -> dict[str, Tensor]:
    """Give a new file of weights the permissions of the umask, and add its hash to the seal.

    No hash is added if the file holds other tensors: those of an adapter that will be replaced.

    Returns:
        The tensors that were sealed.
    """
    if not path.is_file():
        return {}
    allow_as_umask(path)
    content = path.read_bytes()
    tensors = load(content)
    if seal is not None:
        seal["weights_sha256"] = None
        try:
            require_sealed(str(path), seal, tensors)
        except ArtifactError:
            return {}
        seal["weights_sha256"] = hashlib.sha256(content).hexdigest()
    return tensors


def require_sealed(origin: str, seal: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse bases or cores whose hashes differ from the seal."""
    wanted = {name: seal[name] for name in ("bases_sha256", "cores_sha256") if seal.get(name) is not None}
    came = seal_tensors(tensors) if wanted else {}
    for name, recorded in wanted.items():
        if came.get(name) != recorded:
            raise ArtifactError(
                f"The {name.partition('_')[0]} in {origin} are not those that were saved (hash "
                f"{str(came.get(name))[:12]}, "
                f"recorded {str(recorded)[:12]!r}): changed, damaged, or just being written. Load it again."
            )


def require_sound(origin: str, tensors: Mapping[str, Tensor], coordinates: Any) -> dict[str, Factors]:
    """Refuse tensors that are not finite or badly named, and bases that are not orthonormal although they should be.

    Returns:
        The factors by layer. Zero bases belong to an adapter that was never calibrated.
    """
    _require_names(origin, tensors)
    factors = layer_factors(origin, tensors)
    require_finite(origin, tensors, _TRAIN_AGAIN)
    require_orthonormal(origin, {layer: (f.P, f.Q) for layer, f in factors.items()}, coordinates)
    return factors


def require_orthonormal(origin: str, bases: Mapping[str, tuple[Tensor, Tensor]], coordinates: Any) -> None:
    """Refuse P and Q that are not orthonormal although their coordinates are; zero bases pass."""
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
    """Refuse an adapter of cores only that is not finite, badly named, or names no basis."""
    _require_names(origin, tensors)
    if not isinstance(basis_id, str):
        raise ArtifactError(f"{origin} holds cores alone and does not say on which basis. Save or download it again.")
    require_finite(origin, tensors, _TRAIN_AGAIN)


def require_modules(origin: str, modules: Any, tokens: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse an adapter that names trained modules or tokens but does not hold them.

    Args:
        modules: ``modules_to_save`` of its configuration.
        tokens: ``trainable_token_indices``.
    """
    if tokens and not any(".token_adapter." in key for key in tensors):
        raise ArtifactError(
            f"trainable_token_indices names tokens, but {origin} holds none of them. Save or download it again."
        )
    named = list(modules) if isinstance(modules, list | set | tuple) else []
    held = [name for name in named if any(f".{name}." in f".{key}." for key in tensors)]
    if any(name in held for name in CLASSIFIERS):
        held += CLASSIFIERS
    for name in named:
        if name not in held:
            raise ArtifactError(
                f"modules_to_save names {name!r:.60}, but {origin} holds no such module. Save or download it again."
            )


def _require_names(origin: str, tensors: Mapping[str, Tensor]) -> None:
    odd = next((key for key in tensors if not _NAME.fullmatch(key) or ".." in key), None)
    if odd is not None:
        raise ArtifactError(f"A tensor is named like a module, but {origin} holds {odd[:80]!r}. Do not use this file.")


def _tensor_hashes(tensors: Iterable[Tensor]) -> list[str]:
    """Hashes without names, sorted, because transformers may rename layers on loading."""
    return sorted(fingerprint_tensors([("", tensor)]) for tensor in tensors)


def _hash_of(*parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
