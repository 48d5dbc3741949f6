"""The tensors of a saved adapter: their names, the factors of each layer, and all cores as one vector.

An adapter on a named basis stores only its cores, as one vector of Σr² values in the order of the layers' names. For
Qwen2.5-3B the names and shapes of 144 separate cores would take 17 KB beside 147 KB of values. A second, small tensor
marks the basis, so that the cores are refused on another one; files of earlier versions have none.

Shapes: P m x r, Q n x r, R r x r.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from frozencore.errors import ArtifactError
from frozencore.maths.linalg import all_finite

PREFIX = "frozencore_"
"""The prefix of our tensors' names, after the name of their layer."""
BASE = "base_model.model."
FLAT = f"{PREFIX}cores"
"""The name of the vector of all cores."""
MARK = f"{PREFIX}basis"
"""The name of the mark of their basis: 32 numbers from 0 to 255."""


@dataclass(frozen=True)
class Factors:
    """Factors of one layer: P (m x r), Q (n x r), R (r x r)."""

    P: Tensor
    Q: Tensor
    R: Tensor


def layer_factors(origin: str, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Group the tensors of an adapter file, or of PEFT's adapter state dict, by layer."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, found, rest = key.removeprefix(BASE).partition(f".{PREFIX}")
        if found:
            layers.setdefault(layer, {})[rest.removesuffix(".weight")] = tensor
    for layer, parts in layers.items():
        if parts.keys() != {"P", "Q", "R"}:
            raise ArtifactError(f"Layer {layer!r} of {origin} has {sorted(parts)} where P, Q and R are needed.")
        _require_shapes(origin, layer, Factors(**parts))
    if not layers:
        raise ArtifactError(f"{origin} holds no frozen core. Save the adapter again.")
    return {layer: Factors(**parts) for layer, parts in layers.items()}


def _require_shapes(origin: str, layer: str, factors: Factors) -> None:
    P, Q, R = factors.P, factors.Q, factors.R
    one_rank = P.ndim == Q.ndim == R.ndim == 2 and P.shape[1] == Q.shape[1] == R.shape[0] == R.shape[1] > 0
    if not one_rank or not all(is_usable_float(X) and len(X) for X in (P, Q, R)):
        shapes = ", ".join(f"{tuple(X.shape)} {X.dtype}" for X in (P, Q, R))
        raise ArtifactError(
            f"Layer {layer!r} of {origin} must hold floats of 16 bits or more, P (m x r), Q (n x r), R (r x r), but "
            f"{shapes} came. Save or download it again."
        )


def is_usable_float(tensor: Tensor) -> bool:
    """Return whether torch can compute with a tensor's floats; 8-bit floats can only be stored."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


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
    return torch.tensor(list(sha256(basis_id.encode()).digest()), dtype=torch.float32)


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


def warn_of_lost_core(adapter_name: str) -> None:
    """Warn of a trained core on bases that are zero, on which it changes nothing."""
    warnings.warn(
        f"A core works on the basis that it was trained on, but the adapter {adapter_name!r} has a trained core and no "
        "basis, so it acts as the base model. Load the whole adapter, or give it its basis with "
        "frozencore.set_bases(model, bases) and load the core again.",
        UncalibratedWarning,
        stacklevel=2,
    )


def holds_no_basis(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the bases are still zero; all layers get theirs together, so one is enough."""
    first = next((tensor for key, tensor in tensors.items() if f".{PREFIX}P" in key), None)
    return first is not None and not bool(first.any())


def require_finite(origin: str, tensors: Mapping[str, Tensor], way_out: str) -> None:
    """Refuse tensors with NaN, Inf, or values outside float32's range."""
    for key, tensor in tensors.items():
        if not _finite(tensor):
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


def _finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    narrow = tensor.dtype.itemsize == 1 or tensor.dtype == torch.float64  # checked as float32, where cores multiply
    return all_finite(tensor.float() if narrow else tensor)
