"""The basis in a basis model: its identity, and reading it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import MODEL_CONFIG
from frozencore.maths.linalg import all_finite
from frozencore.words import one_line
from frozencore_basis_model import ENTRY

Bases = Mapping[str, tuple[Tensor, Tensor]]
"""P (m x r) and Q (n x r) by layer name."""


def identity_of(bases: Bases) -> str:
    """SHA-256 of P and Q with their layers' names and shapes, whichever float type holds their values."""
    found = hashlib.sha256()
    for name in sorted(bases):
        for side, X in zip("PQ", bases[name], strict=True):
            found.update(f"{name}.{side} {tuple(X.shape)} ".encode())
            found.update(X.detach().cpu().to(torch.float64).contiguous().numpy().tobytes())
    return found.hexdigest()


def read_entry(folder: str | Path) -> dict[str, Any]:
    """What ``config.json`` of a basis model says of its basis: ``ranks`` by layer name, and ``identity``.

    Raises:
        ArtifactError: It is no basis model, or damaged.
    """
    path = Path(folder) / MODEL_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({one_line(error, 100)}). Name a folder of a basis model."
        ) from error
    said = config.get(ENTRY) if isinstance(config, dict) else None
    entry = said if isinstance(said, dict) else {}
    ranks = entry.get("ranks")
    fine = isinstance(ranks, dict) and all(type(rank) is int and rank > 0 for rank in ranks.values())
    if not fine or not isinstance(entry.get("identity"), str):
        raise ArtifactError(
            f"{folder} holds no basis model: its config.json has no sound {ENTRY!r}. "
            "Write one with frozencore export --to basis-model."
        )
    return dict(entry)


def read_bases(folder: str | Path) -> dict[str, tuple[Tensor, Tensor]]:
    """P and Q, by layer name, of a basis model.

    Raises:
        ArtifactError: They are missing, damaged, of other ranks than its configuration says, or not finite.
    """
    folder = Path(folder)
    found: dict[str, Tensor] = {}
    ranks = read_entry(folder)["ranks"]
    wanted = {f"{name}.{side}.weight" for name in ranks for side in "PQ"}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                found |= {key: stored.get_tensor(key) for key in wanted.intersection(stored.keys())}
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{folder} is damaged ({one_line(error, 200)}). Export it again.") from error
    bases = {}
    for name, rank in ranks.items():
        P, Q = found.get(f"{name}.P.weight"), found.get(f"{name}.Q.weight")
        if P is None or Q is None or P.shape[1:] != (rank,) or Q.shape[:1] != (rank,):
            raise ArtifactError(f"{folder} is damaged: layer {name!r} has no P and Q of rank {rank}. Export it again.")
        if not all_finite(P) or not all_finite(Q):
            raise ArtifactError(f"{folder} is damaged: P or Q of layer {name!r} holds NaN or Inf. Export it again.")
        bases[name] = (P, Q.mT.contiguous())
    return bases
