"""The tensors of an adapter's file: their names, how cores become one vector, and what every reader checks.

A file holds P, Q and R of each layer, the scales, a record of the base model, and what ``modules_to_save`` and
``trainable_token_indices`` name. PEFT loads tensors into an adapter that is there already without the configuration
beside them, so what a core was trained with is among them.

An adapter on a named basis stores only its cores, as one vector of Σr² values in the order of the layers' names: for
Qwen2.5-3B the names and shapes of 144 separate cores would take 17 KB beside 147 KB of values. The vector's name ends
with the basis's identity, so that rounding, sums and averages of state dicts keep it, and another basis refuses them.

Shapes: P m x r, Q n x r, R r x r.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frozencore.adapter.saved.base_record import BASE_VALUES, record_as_tensor
from frozencore.adapter.saved.basis import Bases, ScaledBasis, is_usable_float
from frozencore.errors import ArtifactError
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.maths.basis import ORTHONORMAL_COORDINATES, known_basis
from frozencore.maths.linalg import all_finite

PREFIX = "frozencore_"
"""The prefix of our tensors' names, after the name of their layer."""
BASE = "base_model.model."
CORES = f"{PREFIX}cores_"
"""The prefix of the name of the vector of all cores; the first 32 digits of the basis's identity follow."""
SCALES = f"{PREFIX}scales"
"""The name of the scales s, in the order of the layers' names."""
ORTHONORMALITY = 2 * torch.finfo(torch.bfloat16).eps  # a basis may have been rounded to bfloat16 before
CLASSIFIERS = ("classifier", "score")  # PEFT lists both for every classifier, which has one of them
_FACTOR = re.compile(rf"(?P<layer>[\w.-]+)\.{PREFIX}(?P<side>P|Q|R\.weight)")


class Factors(NamedTuple):
    """P (m x r), Q (n x r), R (r x r) and the scale s of one layer."""

    P: Tensor
    Q: Tensor
    R: Tensor
    scale: float

    @property
    def basis(self) -> ScaledBasis:
        return ScaledBasis(self.P, self.Q, self.scale)


def layer_factors(origin: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """P, Q and R by layer, of an adapter's file or of PEFT's adapter state dict; checks shapes and types."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if found := _FACTOR.fullmatch(key.removeprefix(BASE)):
            layers.setdefault(found["layer"], {})[found["side"][0]] = tensor
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
    return {layer: (parts["P"], parts["Q"], parts["R"]) for layer, parts in layers.items()}


def flatten_cores(cores: Mapping[str, Tensor]) -> Tensor:
    """Join R (r x r) of all layers into one vector, on the device of the first."""
    values = [cores[name].detach().reshape(-1) for name in sorted(cores)]
    return torch.cat([value.to(values[0].device) for value in values])


def cores_key(basis_id: str) -> str:
    """The name of the vector of all cores on a basis."""
    return CORES + basis_id[:32]


def vector_of(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The vector of all cores; None if the tensors are not those of cores alone."""
    return next((tensor for key, tensor in tensors.items() if key.startswith(CORES)), None)


def require_cores_of(origin: str, tensors: Mapping[str, Tensor], basis_id: str | None) -> Tensor:
    """Return the vector of all cores; refuse cores of another basis than this one."""
    if basis_id is None or cores_key(basis_id) not in tensors:
        raise ArtifactError(
            f"A core works on its own basis only, but {origin} holds cores of another saved basis than this adapter's. "
            "Load its folder with model.load_adapter instead."
        )
    return tensors[cores_key(basis_id)]


def require_size(origin: str, flat: Tensor, size: int) -> None:
    """Refuse a vector of cores that does not have ``size`` floats."""
    if flat.ndim != 1 or not is_usable_float(flat) or flat.numel() != size:
        raise ArtifactError(
            f"The cores of this basis are {size} numbers, but {origin} holds {flat.dtype} {tuple(flat.shape)}. They "
            "are of another basis, or damaged: save or download them again."
        )


def by_layer(flat: Tensor, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Split contiguous values (..., Σr²) into views (..., r, r), in the order of the ranks."""
    parts = flat.split([r * r for r in ranks.values()], dim=-1)
    return {name: part.unflatten(-1, (r, r)) for part, (name, r) in zip(parts, ranks.items(), strict=True)}


def with_factors(origin: str, tensors: Mapping[str, Tensor], bases: Bases) -> dict[str, Tensor]:
    """Replace the vector of all cores by P, Q and R of every layer."""
    flat = vector_of(tensors)
    assert flat is not None
    ranks = {name: bases[name].P.shape[1] for name in sorted(bases)}
    require_size(origin, flat, sum(r * r for r in ranks.values()))
    cores = by_layer(flat, ranks)
    whole = {key: tensor for key, tensor in tensors.items() if not key.startswith(CORES)}
    for name, (P, Q, _) in bases.items():
        whole |= {f"{BASE}{name}.{PREFIX}P": P, f"{BASE}{name}.{PREFIX}Q": Q}
        whole[f"{BASE}{name}.{PREFIX}R.weight"] = cores[name].clone()
    return whole


def trained_with(bases: Bases, base: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The tensors that stand beside P, Q and R: the scales, and the record of the base model."""
    values = torch.tensor([bases[name].scale for name in sorted(bases)], dtype=torch.float32)
    return {SCALES: values, **record_as_tensor(base)}


def factors_alone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without those of :func:`trained_with`."""
    return {key: X for key, X in tensors.items() if SCALES not in key and BASE_VALUES not in key}


def require_scales(origin: str, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
    """Refuse cores that were trained at other scales than these of the layers; rounding in their dtype passes."""
    came = tensors.get(SCALES, tensors.get(BASE + SCALES))
    if came is None or not is_usable_float(came) or came.shape != (len(scales),):
        raise ArtifactError(
            f"An adapter holds the scale of each of its {len(scales)} layers, but {origin} does not. Save or download "
            "it again."
        )
    if came.is_meta:
        return
    names = sorted(scales)
    own = torch.tensor([scales[name] for name in names], dtype=torch.float32)
    far = (own - came.cpu().float()).abs() > 4 * torch.finfo(came.dtype).eps * own.abs()
    for name, theirs, is_far in zip(names, came.tolist(), far.tolist(), strict=True):
        if is_far:
            raise other_scale(origin, name, theirs, scales[name])


def other_scale(origin: str, layer: str, theirs: float, own: float) -> ArtifactError:
    """The error for a core that was trained at another scale."""
    return ArtifactError(
        f"A core works at its own scale only, but that of layer {layer!r} of {origin} was trained at scale "
        f"{theirs:g}, and the adapter has {own:g}. Load the folder under a name that the model does not have."
    )


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the tensors and their names, without the prefix that a model without PEFT's wrapper does not have."""
    named = {key.removeprefix(BASE): tensor for key, tensor in tensors.items()}
    return fingerprint_tensors((key, named[key]) for key in sorted(named))


def hash_bases(bases: Bases) -> str:
    """SHA-256 of P and Q by layer name."""
    return fingerprint_tensors(
        (f"{name}.{side}", X) for name in sorted(bases) for side, X in zip("PQ", bases[name][:2], strict=True)
    )


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


def require_orthonormal(origin: str, bases: Mapping[str, tuple[Tensor, Tensor, object]], coordinates: Any) -> None:
    """Refuse P and Q that are not orthonormal although their coordinates are; zero bases pass."""
    promised = isinstance(coordinates, str) and coordinates in ORTHONORMAL_COORDINATES
    if promised and any(bool(P.any()) or bool(Q.any()) for P, Q, _ in bases.values()):
        for layer, (P, Q, _) in bases.items():
            error = known_basis(P, Q).orthonormality_error()
            if not error <= ORTHONORMALITY:
                raise ArtifactError(
                    f"With coordinates={coordinates!r} a basis is orthonormal, but that of layer {layer!r} of {origin} "
                    f"is off by {error:.2g}. Save or download it again."
                )


def require_sound(
    origin: str, tensors: Mapping[str, Tensor], *, coordinates: Any, basis_id: Any
) -> dict[str, tuple[Tensor, Tensor, Tensor]] | None:
    """Check the values of an adapter's tensors.

    They must be finite. Bases must be orthonormal if their coordinates are; zero bases belong to
    an adapter that was never calibrated. Cores alone must be those of the basis that the configuration names.

    Returns:
        P, Q and R by layer; None for cores alone.
    """
    if vector_of(tensors) is not None:
        if not isinstance(basis_id, str):
            raise ArtifactError(
                f"{origin} holds cores alone and does not say on which basis. Save or download it again."
            )
        require_cores_of(origin, tensors, basis_id)
        require_finite(origin, tensors)
        return None
    factors = layer_factors(origin, tensors)
    require_finite(origin, tensors)
    require_orthonormal(origin, factors, coordinates)
    return factors


def other_keys(tensors: Collection[str]) -> list[str]:
    """The names that are neither of factors, with what they were trained with, nor of the first vector of cores."""
    others = [key for key in tensors if not _FACTOR.fullmatch(key)]
    starts = (CORES,) if any(key.startswith(CORES) for key in others) else (SCALES, BASE_VALUES)
    own = {next((key for key in others if key.removeprefix(BASE).startswith(one)), None) for one in starts}
    return [key for key in others if key not in own]


def require_modules(origin: str, modules: Any, tokens: Any, tensors: Collection[str]) -> None:
    """Refuse an adapter that names trained modules or tokens but does not hold them.

    Args:
        modules: ``modules_to_save`` of its configuration.
        tokens: ``trainable_token_indices``.
        tensors: The names of its tensors.
    """
    if tokens and not any(".token_adapter." in key for key in tensors):
        raise ArtifactError(
            f"trainable_token_indices names tokens, but {origin} holds none of them. Save or download it again."
        )
    named = list(modules) if isinstance(modules, list | set | tuple) else []
    held = [name for name in named if any(f".{name}." in f".{key}." for key in other_keys(tensors))]
    if any(name in held for name in CLASSIFIERS):
        held += CLASSIFIERS
    for name in named:
        if name not in held:
            raise ArtifactError(
                f"modules_to_save names {name!r:.60}, but {origin} holds no such module. Save or download it again."
            )


def refuse_foreign(origin: str, modules: Any, tokens: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that no adapter holds: one with the name of a base weight would change the base model for good.

    Args:
        modules, tokens: See :func:`require_modules`. A weight that is tied to a named one is equal to it.
    """
    named, others = list(modules) if isinstance(modules, list | set | tuple) else [], other_keys(tensors)
    of_tokens = [key for key in others if tokens and key.endswith(".token_adapter.trainable_tokens_delta")]
    of_modules = [key for key in others if any(f"{name}." in key for name in named) and ".original_module." not in key]
    for key in others:
        if key not in (*of_tokens, *of_modules) and not any(
            torch.equal(tensors[key], tensors[own]) for own in of_modules
        ):
            raise foreign_tensor(origin, key)


def foreign_tensor(origin: str, key: str) -> ArtifactError:
    """The error for a tensor that no adapter holds."""
    return ArtifactError(
        f"An adapter holds cores, bases, and what modules_to_save and trainable_token_indices name, but {origin} also "
        f"holds {key[:200]!r}, which may change the base model. Save the adapter again, or name that module."
    )
