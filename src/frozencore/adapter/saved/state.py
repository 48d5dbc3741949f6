"""The state of a saved adapter: its tensors, and the seal that shows whether it is complete and unchanged.

A file holds P, Q and R of each layer. An adapter on a named basis stores only its cores, as one vector of Σr² values in
the order of the layers' names: for Qwen2.5-3B the names and shapes of 144 separate cores would take 17 KB beside 147 KB
of values. A second, small tensor marks the basis, so that the cores are refused on another one; files of earlier
versions have none.

``save_pretrained`` writes a seal into ``adapter_config.json``:

    format           of the folder; a newer one is refused
    weights_sha256   of the bytes of adapter_model.safetensors
    bases_sha256     of the values of P and Q; cores_sha256: of R
    base             some values of the base model's weights (:mod:`frozencore.adapter.saved.basis`)

For an adapter of cores only (format 2), bases and base model are in the named basis. A missing field is not checked.

``FrozenCoreConfig.from_pretrained`` checks a local folder. ``FrozenCoreModel`` checks the tensors before they enter the
model, also from a hub id. transformers' own ``model.load_adapter`` uses neither; then only format and base model are
checked.

Shapes: P m x r, Q n x r, R r x r.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from frozencore.adapter.saved.basis import is_usable_float
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import (
    CONFIG_FILE,
    PEFT_TYPE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    damaged,
    missing,
    read_config,
)
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.files.whole_file import allow_as_umask
from frozencore.maths.basis import ORTHONORMAL_COORDINATES, known_basis
from frozencore.maths.linalg import all_finite

PREFIX = "frozencore_"
"""The prefix of our tensors' names, after the name of their layer."""
BASE = "base_model.model."
FLAT = f"{PREFIX}cores"
"""The name of the vector of all cores."""
MARK = f"{PREFIX}basis"
"""The name of the mark of their basis: 32 numbers from 0 to 255."""
CORES_FORMAT, NEWEST_FORMAT = 2, 3  # cores only; 3 is of an adapter in rounds, which is refused
ORTHONORMALITY = 2 * torch.finfo(torch.bfloat16).eps  # a basis may have been rounded to bfloat16 before
CLASSIFIERS = ("classifier", "score")  # PEFT lists both for every classifier, which has one of them
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]+")


@dataclass(frozen=True)
class Factors:
    """Factors of one layer: P (m x r), Q (n x r), R (r x r)."""

    P: Tensor
    Q: Tensor
    R: Tensor


def layer_factors(origin: str, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Group the tensors of an adapter file, or of PEFT's adapter state dict, by layer; check shapes and types."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, found, rest = key.removeprefix(BASE).partition(f".{PREFIX}")
        if found:
            layers.setdefault(layer, {})[rest.removesuffix(".weight")] = tensor
    if not layers:
        raise ArtifactError(f"{origin} holds no frozen core. Save the adapter again.")
    for layer, parts in layers.items():
        if parts.keys() != {"P", "Q", "R"}:
            raise ArtifactError(f"Layer {layer!r} of {origin} has {sorted(parts)} where P, Q and R are needed.")
        P, Q, R = parts["P"], parts["Q"], parts["R"]
        one_rank = P.ndim == Q.ndim == R.ndim == 2 and P.shape[1] == Q.shape[1] == R.shape[0] == R.shape[1] > 0
        if not one_rank or not all(is_usable_float(X) and len(X) for X in (P, Q, R)):
            shapes = ", ".join(f"{tuple(X.shape)} {X.dtype}" for X in (P, Q, R))
            raise ArtifactError(
                f"Layer {layer!r} of {origin} must hold floats of 16 bits or more, P (m x r), Q (n x r), R (r x r), "
                f"but {shapes} came. Save or download it again."
            )
    return {layer: Factors(**parts) for layer, parts in layers.items()}


def flatten_cores(cores: Mapping[str, Tensor]) -> Tensor:
    """Join R (r x r) of all layers into one vector, on the device of the first."""
    values = [cores[name].detach().reshape(-1) for name in sorted(cores)]
    return torch.cat([value.to(values[0].device) for value in values])


def cores_alone(flat: Tensor, basis_id: str) -> dict[str, Tensor]:
    """The tensors of an adapter of cores only: all cores, and the mark of their basis."""
    return {FLAT: flat, MARK: _mark_of(basis_id).to(flat.device)}


def require_marked(origin: str, tensors: Mapping[str, Tensor], basis_id: str | None) -> None:
    """Refuse cores whose mark is not that of this basis; cores without a mark pass.

    Sums and averages of adapters on one basis keep its mark up to a factor.
    """
    if MARK not in tensors:
        return
    came = tensors[MARK].detach().cpu().double()
    if basis_id is not None and came.shape == (own := _mark_of(basis_id).double()).shape:
        factor = float(came @ own / (own @ own))
        if float((came - factor * own).abs().max()) <= max(2 * abs(factor), 1e-3):  # rounded to bfloat16
            return
    raise ArtifactError(
        f"A core works on its own basis only, but {origin} holds cores of another saved basis than this adapter's. "
        "Load its folder with model.load_adapter instead."
    )


def _mark_of(basis_id: str) -> Tensor:
    """Floats, because users average all tensors of a state dict; small integers, which every dtype holds."""
    return torch.tensor(list(hashlib.sha256(basis_id.encode()).digest()), dtype=torch.float32)


def require_size(origin: str, flat: Tensor, size: int) -> None:
    """Refuse a vector of cores that does not have ``size`` floats."""
    if flat.ndim != 1 or not is_usable_float(flat) or flat.numel() != size:
        raise ArtifactError(
            f"The cores of this basis are {size} numbers, but {origin} holds {flat.dtype} {tuple(flat.shape)}. They "
            "are of another basis, or damaged: save or download them again."
        )


def split_cores(origin: str, flat: Tensor, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Split the vector into views R (r x r) by layer name."""
    require_size(origin, flat, sum(r * r for r in ranks.values()))
    return by_layer(flat, {name: ranks[name] for name in sorted(ranks)})


def by_layer(flat: Tensor, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Split contiguous values (..., Σr²) into views (..., r, r), in the order of the ranks."""
    parts = flat.split([r * r for r in ranks.values()], dim=-1)
    return {name: part.unflatten(-1, (r, r)) for part, (name, r) in zip(parts, ranks.items(), strict=True)}


def with_factors(
    origin: str, tensors: Mapping[str, Tensor], bases: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Replace the vector of all cores by P, Q and R of every layer."""
    cores = split_cores(origin, tensors[FLAT], {name: P.shape[1] for name, (P, _) in bases.items()})
    whole = {name: tensor for name, tensor in tensors.items() if name not in (FLAT, MARK)}
    for name, (P, Q) in bases.items():
        whole |= {f"{BASE}{name}.{PREFIX}P": P, f"{BASE}{name}.{PREFIX}Q": Q}
        whole[f"{BASE}{name}.{PREFIX}R.weight"] = cores[name].clone()
    return whole


class UncalibratedWarning(UserWarning):
    """Warning: an adapter that was never calibrated is saved, loaded or merged."""


def warn_of_uncalibrated(what: str, then: str) -> None:
    """Warn of an adapter whose bases are zero, so that it changes nothing.

    Args:
        what: The adapter, as the beginning of a sentence.
        then: What to do after calibration.
    """
    zero = "its bases are zero and it changes nothing. Call frozencore.calibrate(model, dataloader)"
    warnings.warn(f"{what} was never calibrated: {zero} {then}.", UncalibratedWarning, stacklevel=4)


def holds_no_basis(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the bases are still zero; all layers get theirs together, so one is enough."""
    first = next((tensor for key, tensor in tensors.items() if f".{PREFIX}P" in key), None)
    return first is not None and not bool(first.any())


def require_finite(
    origin: str, tensors: Mapping[str, Tensor], way_out: str = "Train it again, or load an earlier checkpoint."
) -> None:
    """Refuse tensors with NaN, Inf, or values outside float32's range."""
    for key, tensor in tensors.items():
        if tensor.is_meta or not tensor.is_floating_point():
            continue
        narrow = tensor.dtype.itemsize == 1 or tensor.dtype == torch.float64
        if not all_finite(tensor.float() if narrow else tensor):  # checked as float32, where cores multiply
            held = "values that no float32 holds" if all_finite(tensor) else "NaN or Inf"
            raise ArtifactError(f"An adapter is finite, but {key!r:.200} of {origin} holds {held}. {way_out}")


def require_finite_in(what: str, came: Tensor, dtype: torch.dtype) -> None:
    """Refuse finite values that overflow in the dtype of the model.

    Args:
        what: The name of the values, for the error.
    """
    if not came.is_floating_point() or came.numel() == 0:
        return
    if torch.finfo(came.dtype).max > torch.finfo(dtype).max and not all_finite(came.to(dtype)):
        raise ArtifactError(
            f"An adapter is finite in the dtype of its model, but {what} holds values that {dtype} does not. "
            "Load the base model in a wider dtype, or train the adapter again."
        )


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


def require_sound(
    origin: str, tensors: Mapping[str, Tensor], *, coordinates: Any, basis_id: Any
) -> dict[str, Factors] | None:
    """Check the names and values of a file's tensors.

    They must be finite and named like modules. Bases must be orthonormal if their coordinates are; zero bases belong to
    an adapter that was never calibrated. Cores alone must name their basis.

    Returns:
        The factors by layer; None for cores alone.
    """
    odd = next((key for key in tensors if not _NAME.fullmatch(key) or ".." in key), None)
    if odd is not None:
        raise ArtifactError(f"A tensor is named like a module, but {origin} holds {odd[:80]!r}. Do not use this file.")
    if FLAT in tensors:
        if not isinstance(basis_id, str):
            raise ArtifactError(
                f"{origin} holds cores alone and does not say on which basis. Save or download it again."
            )
        require_finite(origin, tensors)
        return None
    factors = layer_factors(origin, tensors)
    require_finite(origin, tensors)
    require_orthonormal(origin, {layer: (f.P, f.Q) for layer, f in factors.items()}, coordinates)
    return factors


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


def read_folder(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the configuration and tensors of an adapter of any PEFT method; check a frozen core against its seal.

    The weights are read once, so the hashed bytes are the returned bytes.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ArtifactError(missing(directory, name))
    values = read_config(directory)
    try:
        content = (directory / WEIGHTS_FILE).read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise damaged(directory, error) from error
    origin = str(directory)
    if values.get("peft_type") != PEFT_TYPE:
        require_finite(origin, tensors)
        return values, tensors
    refuse_gone(origin, values)
    seal = read_seal(origin, values.get("seal"))
    require_sound(origin, tensors, coordinates=values.get("coordinates", "qr"), basis_id=values.get("basis_id"))
    require_modules(origin, values.get("modules_to_save"), values.get("trainable_token_indices"), tensors)
    recorded, came = seal.get("weights_sha256"), hashlib.sha256(content).hexdigest()
    if recorded not in (None, came):
        raise ArtifactError(
            f"{WEIGHTS_FILE} in {directory} is not the file that was saved (SHA-256 {came[:12]}, recorded "
            f"{str(recorded)[:12]!r}): changed, damaged, or just being written. Try again, or download it again."
        )
    require_sealed(origin, seal, tensors)
    return values, tensors


def require_loadable(directory: Path) -> None:
    """Check a local folder before PEFT reads it; a folder with only a configuration passes."""
    holds_weights = (directory / WEIGHTS_FILE).exists() or (directory / WEIGHTS_FILE).is_symlink()
    if holds_weights or (directory / PICKLE_FILE).exists():
        read_folder(directory)


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


def read_seal(origin: str, seal: Any) -> dict[str, Any]:
    """Check that this version understands a seal; None gives an empty seal.

    Raises:
        ArtifactError: It is malformed or of a newer format.
    """
    if seal is None:
        return {}
    number = seal.get("format") if isinstance(seal, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArtifactError(f"The seal of the adapter in {origin} is malformed. Save or download it again.")
    if number > NEWEST_FORMAT:
        raise ArtifactError(
            f"The adapter in {origin} has format {number}, and this frozencore reads up to {NEWEST_FORMAT}. "
            "Run: pip install -U frozencore"
        )
    return dict(seal)


def seal_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Hash the factors; prefixes of keys and adapter names do not matter.

    Hashes of single tensors are without names and sorted, because transformers may rename layers on loading.
    """
    if FLAT in tensors:
        return {"format": CORES_FORMAT, "cores_sha256": fingerprint_tensors([("", tensors[FLAT])])}
    hashes: dict[str, list[str]] = {"P": [], "Q": [], "R": []}
    for key, tensor in tensors.items():
        _, found, rest = key.partition(f".{PREFIX}")
        if found and rest[:1] in hashes:
            hashes[rest[0]].append(fingerprint_tensors([("", tensor)]))

    def joined(*sides: str) -> str:
        return hashlib.sha256(json.dumps([sorted(hashes[side]) for side in sides]).encode()).hexdigest()

    return {"format": 1, "bases_sha256": joined("P", "Q"), "cores_sha256": joined("R")}


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
                f"{str(came.get(name))[:12]}, recorded {str(recorded)[:12]!r}): changed, damaged, or just being "
                "written. Load it again."
            )
