"""Whether the tensors of an adapter are finite in the dtypes that they are used in, and all there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from frozencore.errors import ArtifactError
from frozencore.maths.linalg import all_finite


def require_finite(origin: str, tensors: Mapping[str, Tensor], way_out: str) -> None:
    """Refuse NaN, Inf, and values that no float32 holds.

    Raises:
        ArtifactError: The first tensor that holds one.
    """
    for key, tensor in tensors.items():
        if not _finite(tensor):
            held = "values that no float32 holds" if all_finite(tensor) else "NaN or Inf"
            raise ArtifactError(f"An adapter is finite, but {key!r:.200} of {origin} holds {held}. {way_out}")


def require_finite_in(what: str, came: Tensor, dtype: torch.dtype) -> None:
    """Refuse values that are finite as they came, and not in the dtype in which a model computes with them.

    Args:
        what: Whose they are, for the error.

    Raises:
        ArtifactError: They are not.
    """
    if not came.is_floating_point() or came.numel() == 0:
        return
    if torch.finfo(came.dtype).max > torch.finfo(dtype).max and not all_finite(came.to(dtype)):
        raise ArtifactError(
            f"An adapter is finite in the dtype of its model, but {what} holds values that {dtype} does not. "
            "Load the base model in a wider dtype, or train the adapter again."
        )


CLASSIFIERS = ("classifier", "score")
"""The heads that PEFT names in every adapter of a classifier, which has one of the two."""


def require_modules(origin: str, modules: Any, tokens: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse an adapter that names trained modules or tokens and does not hold them.

    Args:
        modules: ``modules_to_save`` of its configuration.
        tokens: ``trainable_token_indices``.

    Raises:
        ArtifactError: The first that is missing.
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


def _finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    narrow = tensor.dtype.itemsize == 1 or tensor.dtype == torch.float64  # as float32, in which cores are computed
    return all_finite(tensor.float() if narrow else tensor)
