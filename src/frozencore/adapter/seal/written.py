"""What is done to a file of weights that has just been written, before its configuration is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from frozencore.adapter.seal.factors import PREFIX
from frozencore.adapter.seal.integrity import require_sealed
from frozencore.errors import ArtifactError
from frozencore.files.whole_file import allow_as_umask


def seal_file(path: Path, seal: dict[str, Any] | None) -> dict[str, Tensor]:
    """Open the file to whom the umask allows, and add its hash to the seal.

    No hash is added where it holds other tensors: those of an adapter that is about to be replaced.

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


def holds_no_basis(tensors: Mapping[str, Tensor]) -> bool:
    """Whether factors are still zero; all layers get theirs at once, so one tells."""
    first = next((tensor for key, tensor in tensors.items() if f".{PREFIX}P" in key), None)
    return first is not None and not bool(first.any())
