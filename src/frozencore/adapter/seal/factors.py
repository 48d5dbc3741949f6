"""The three factors of a layer, as they stand in an adapter file or in PEFT's adapter state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from frozencore.errors import ArtifactError

PREFIX = "frozencore_"
"""What the name of every tensor of ours begins with, below its layer."""
BASE = "base_model.model."


@dataclass(frozen=True)
class Factors:
    """Factors of one layer: P (m x r), Q (n x r), R (r x r)."""

    P: Tensor
    Q: Tensor
    R: Tensor


def layer_factors(origin: str, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Factors by layer name, from the tensors of an adapter file or of PEFT's adapter state dict.

    Raises:
        ArtifactError: A layer lacks one of its factors, or their shapes do not go together, or there is none.
    """
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


def is_usable_float(tensor: Tensor) -> bool:
    """Whether a tensor holds floats that torch computes with: those of 8 bits are only stored."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _require_shapes(origin: str, layer: str, factors: Factors) -> None:
    P, Q, R = factors.P, factors.Q, factors.R
    together = P.ndim == Q.ndim == R.ndim == 2 and P.shape[1] == Q.shape[1] == R.shape[0] == R.shape[1] > 0
    if not together or not all(is_usable_float(X) and len(X) for X in (P, Q, R)):
        shapes = ", ".join(f"{tuple(X.shape)} {X.dtype}" for X in (P, Q, R))
        raise ArtifactError(
            f"Layer {layer!r} of {origin} must hold floats of 16 bits or more, P (m x r), Q (n x r), R (r x r), but "
            f"{shapes} came. Save or download it again."
        )
