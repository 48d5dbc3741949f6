"""A frozen core as a LoRA on the ``core`` layers of its basis model: ``A = I``, ``B = s·R``, so that ``B A = s·R``.

Shapes: r rank of a layer, k the largest rank of a core; ``lora_A.weight`` is k x r and ``lora_B.weight`` r x k, padded
with zeros, because engines need one rank for all layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from frozencore.adapter.export.basis_model import Bases, identity_of, read_entry
from frozencore.adapter.export.lora import lora_config
from frozencore.adapter.export.source import ExportSource, export_source, in_dtype, require_dtype
from frozencore.adapter.saved.card import CARD_FILE
from frozencore.adapter.saved.tensors import BASE
from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from frozencore.files.whole_file import whole_folder
from frozencore_basis_model import ENTRY

CORE = "core"


@dataclass(frozen=True)
class TenantExport:
    """The tenant that was written.

    Attributes:
        rank: The one rank of all layers; smaller cores are zero-padded to it.
        layers: The layers with a core.
        identity: The identity of the basis (:func:`frozencore.adapter.export.basis_model.identity_of`).
    """

    directory: Path
    rank: int
    layers: tuple[str, ...]
    identity: str


def export_tenant(
    model_or_directory: nn.Module | str | Path,
    out: str | Path,
    *,
    adapter_name: str | None = None,
    basis_model: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> TenantExport:
    """Write the cores of an adapter for the basis model of its basis.

    Args:
        model_or_directory: A model with a frozen-core adapter, or a folder that ``save_pretrained`` wrote.
        adapter_name: Which adapter of the model; the active one by default.
        basis_model: Folder of the basis model, to check that its basis is the adapter's. Without it nothing is checked:
        cores on another basis give wrong outputs, and no engine notices.
        dtype: The dtype of the factors. Half precision halves the file and costs about 0.2 % of the update in bfloat16.

    Raises:
        ArtifactError: The adapter is damaged, ``out`` exists, or the basis model has another basis.
        ConfigError: The adapter does not exist, has no basis, or trains more than its cores.
    """
    adapter = _one_round_of(model_or_directory, adapter_name, dtype)
    identity = identity_of(_bases(adapter))
    ranks = {name: len(f.R) for name, f in adapter.factors.items()}
    if basis_model is not None:
        _require_basis(str(adapter.folder or "this adapter"), identity, str(basis_model))
    rank = max(len(f.R) for f in adapter.factors.values())
    with whole_folder(Path(out), overwrite=overwrite, reads=adapter.folder) as aside:
        cores = _cores(adapter, ranks, rank, dtype)
        ones = {
            f"{BASE}{name}.{CORE}.lora_A.weight": torch.eye(rank, ranks[name], dtype=dtype) for name in adapter.factors
        }
        (aside / WEIGHTS_FILE).write_bytes(_weights(ones | cores, identity))
        config = lora_config(adapter.config, rank, [CORE], fan_in_fan_out=False)
        config |= {"base_model_name_or_path": None if basis_model is None else str(basis_model), "revision": None}
        (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (aside / CARD_FILE).write_text(_card(len(adapter.factors), rank, identity), encoding="utf-8")
    return TenantExport(Path(out), rank, tuple(adapter.factors), identity)


def tenant_weights(
    model: nn.Module, *, identity: str, adapter_name: str | None = None, dtype: torch.dtype = torch.float32
) -> bytes:
    """Return the cores as the weights file of a tenant, for an engine that takes them from memory.

    They are what :func:`export_tenant` writes, without the identity matrices A. On the engine's side
    :class:`frozencore_basis_model.TenantWorker` reads them, and refuses those of another basis.

    Args:
        identity: The basis of the engine's model (:attr:`BasisModelExport.identity`). The caller knows that it is the
            adapter's: P and Q are not hashed here, which would take longer than everything else.
        adapter_name: Which adapter of the model; the active one by default.

    Raises:
        ConfigError: The adapter does not exist, has no basis, or trains more than its cores.
        ArtifactError: A core has values that are not finite in ``dtype``.
    """
    adapter = _one_round_of(model, adapter_name, dtype)
    ranks = {name: len(f.R) for name, f in adapter.factors.items()}
    return _weights(_cores(adapter, ranks, max(ranks.values()), dtype), identity)


def _one_round_of(
    model_or_directory: nn.Module | str | Path, adapter_name: str | None, dtype: torch.dtype
) -> ExportSource:
    require_dtype(dtype)
    adapter = export_source(model_or_directory, adapter_name)
    return adapter


def _weights(tensors: dict[str, Tensor], identity: str) -> bytes:
    return save(tensors, metadata={"format": "pt", ENTRY: identity})


def _bases(adapter: ExportSource) -> Bases:
    """P and Q from the named basis, because a model in 16 bits holds them rounded."""
    if adapter.folder is None and adapter.config.basis_id is not None:
        return adapter.config.find_basis("this adapter").layers
    return {name: (f.P, f.Q) for name, f in adapter.factors.items()}


def _require_basis(origin: str, identity: str, basis_model: str) -> None:
    """Check that a basis model has the adapter's basis."""
    theirs = read_entry(basis_model)["identity"]
    if identity != theirs:
        raise ArtifactError(
            f"{origin} was trained on the basis {identity[:12]}, but {basis_model} has the basis {theirs[:12]}. A core "
            "works on its own basis only. Name the basis model that was made from it."
        )


def _cores(adapter: ExportSource, ranks: Mapping[str, int], rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, factors in adapter.factors.items():
        r = len(factors.R)
        B = torch.zeros(ranks[name], rank, dtype=torch.float64)
        B[:r, :r] = adapter.scales[name] * factors.R.detach().cpu().double()
        key = f"{BASE}{name}.{CORE}.lora_B.weight"
        tensors[key] = in_dtype(key, B, dtype)
    return tensors


def _card(num_layers: int, rank: int, identity: str) -> str:
    return f"""---
library_name: peft
tags: [frozencore, lora]
---
# A tenant of a basis model

- Cores of rank {rank} in {num_layers} layers, as a LoRA on the `core` layers alone
- Basis: {identity[:12]}; on a basis model of another one these numbers mean nothing

vLLM serves it on its basis model: `--enable-lora --lora-target-modules core`. Stock PEFT loads it there too.
"""
