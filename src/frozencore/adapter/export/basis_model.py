"""A base model with a basis in it, which an engine loads once for all tenants (:mod:`frozencore_basis_model`).

Beside each adapted layer stand ``Q.weight`` (r x n) = Qᵀ, ``core.weight`` (r x r) of zeros and ``P.weight`` (m x r).
P and Q have the same bits as in the basis. P times the scale s in 16 bits would be rounded once more, so a tenant's
core is s·R, and the scales stand in ``config.json`` for engines that read adapters (:mod:`frozencore_vllm`).

A tenant is a LoRA on the ``core`` layers: ``A = I``, ``B = s·R``, so that ``B A = s·R``. With r the rank of a layer and
k the largest rank of a core, ``lora_A.weight`` is k x r and ``lora_B.weight`` r x k, padded with zeros, because engines
need one rank for all layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import frozencore_basis_model
from frozencore.adapter.base_record import require_same_weights, samples_of
from frozencore.adapter.basis import Basis, require_same_id, require_set
from frozencore.adapter.core import BASE
from frozencore.adapter.export.base_model import base_name, layers_of, load_base_model, save_tokenizer
from frozencore.adapter.export.lora import (
    ExportSource,
    export_source,
    in_dtype,
    lora_config,
    require_dtype,
)
from frozencore.adapter.folders import read_basis
from frozencore.adapter.named_layers import owners_of_weights
from frozencore.errors import ArtifactError, ModelError
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.hub import safe_loading
from frozencore.files.names import CARD_FILE, CONFIG_FILE, MODEL_CONFIG, WEIGHTS_FILE
from frozencore.text import one_line
from frozencore_basis_model import ENTRY, MODEL_TYPE, config_class

CODE_FILE, CORE = "frozencore_basis_model.py", "core"
# With this name vLLM and SGLang use the model that AutoModel builds, without options.
ARCHITECTURE = "TransformersForCausalLM"


@dataclass(frozen=True)
class BasisModelExport:
    """The basis model that was written.

    Attributes:
        ranks: Ranks by layer name.
        basis_id: The id of its basis.
    """

    directory: Path
    ranks: dict[str, int]
    basis_id: str


def export_basis_model(
    directory: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str = "auto",
    with_code: bool = False,
    overwrite: bool = False,
) -> BasisModelExport:
    """Write the base model with a basis in it, and the tokenizer.

    Args:
        directory: A basis, or an adapter, whose core is left out.
        base: Folder, GGUF file or hub id of the base model; by default the one that the basis or adapter names.
        dtype: The dtype of the base weights; ``auto`` keeps theirs. P and Q are written as they are.
        with_code: Put the architecture's code into the folder too, for engines that have no frozencore; they must then
            be started with their option to trust a model's code.

    Raises:
        ArtifactError: The basis is damaged or of another base model, or ``out`` exists.
        ConfigError: No base model is named.
        CalibrationError: There is no basis yet.
        ModelError: The base model cannot be read, is quantised, or is no causal language model.
    """
    directory, out = Path(directory), Path(out)
    basis = read_basis(directory)
    require_set(basis.layers)
    base = base_name(directory, base, basis.base_model)
    loading = safe_loading(base)
    with atomic_folder(out, overwrite=overwrite, reads=[directory, basis.place, base]) as aside:
        model = load_base_model(base, dtype, loading, "a basis stands beside plain weights")
        require_fits(basis, directory, model, base)
        _with_basis(model, basis).save_pretrained(aside, save_original_format=False)
        values = json.loads((aside / MODEL_CONFIG).read_text(encoding="utf-8"))
        values["architectures"] = [ARCHITECTURE]
        if with_code:
            values["auto_map"] = {"AutoConfig": f"{Path(CODE_FILE).stem}.BasisModelConfig"}
            (aside / CODE_FILE).write_bytes(Path(frozencore_basis_model.__file__).read_bytes())
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (aside / MODEL_CONFIG).write_text(text, encoding="utf-8")
        save_tokenizer(directory, aside, loading)
        (aside / CARD_FILE).write_text(_card(base, basis, out), encoding="utf-8")
    return BasisModelExport(out, basis.ranks, basis.id)


def read_entry(folder: str | Path) -> dict[str, Any]:
    """Read the entry of a basis model's ``config.json``: ``basis_id``, and ``ranks`` and ``scales`` by layer name."""
    path = Path(folder) / MODEL_CONFIG
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))[ENTRY])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(
            f"{folder} is no basis model ({one_line(error, 100)}): its config.json has no {ENTRY!r}. Write one with "
            "frozencore export --to basis-model."
        ) from error


def require_fits(basis: Basis, origin: Path, model: Any, base: str) -> None:
    known = AutoModelForCausalLM._model_mapping
    if type(model.config) not in known or type(model) is not known[type(model.config)]:
        raise ModelError(
            f"A basis model is a causal language model of transformers, but {base} is a {type(model).__name__}. "
            "Export a LoRA, or merge."
        )
    linear, num_owners = layers_of(model), owners_of_weights(model)
    for name, factors in basis.layers.items():
        linear.require_layer(name, (len(factors.P), len(factors.Q)))
        if num_owners[id(model.get_submodule(name).weight)] > 1:
            raise ModelError(
                f"A basis stands beside the weight of its own layer, but {name!r} shares its weight with another layer "
                f"of {base}. Export a LoRA."
            )
        if not name.startswith(f"{model.base_model_prefix}."):
            raise ModelError(
                f"A basis stands in the layers below the head, but {origin} has one on {name!r}, which engines "
                "compute apart. Export a LoRA, or merge."
            )
    if basis.base is not None:
        require_same_weights(f"The basis of {origin}", basis.base, samples_of(model, basis.layers))


def _with_basis(model: Any, basis: Basis) -> Any:
    """The same model, its tensors not copied, with P, Q and cores of zeros."""
    values = {**model.config.to_dict(), "model_type": MODEL_TYPE}
    values[ENTRY] = {
        "config": type(model.config).__name__,
        "ranks": basis.ranks,
        "scales": basis.scales,
        "basis_id": basis.id,
    }
    config = config_class(type(model.config).__name__).from_dict(values)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    inside = {f"{name}.{part}": f"{name}.base.{part}" for name in basis.layers for part in ("weight", "bias")}
    state = {inside.get(key, key): tensor for key, tensor in model.state_dict().items()}
    for name, factors in basis.layers.items():
        state |= {f"{name}.Q.weight": factors.Q.mT.contiguous(), f"{name}.P.weight": factors.P.contiguous()}
        state[f"{name}.core.weight"] = factors.P.new_zeros(factors.rank, factors.rank)
    made.load_state_dict(state, assign=True)
    made.tie_weights()
    made.generation_config = model.generation_config
    return made


def _card(base: str, basis: Basis, place: Path) -> str:
    low, high = min(basis.ranks.values()), max(basis.ranks.values())
    name = Path(base).name if Path(base).is_dir() else base
    return f"""---
library_name: transformers
tags: [frozencore, frozencore-basis-model]
---
# {name} with a basis for frozen cores

- Base model: `{name}`
- Rank: {low if low == high else f"{low} to {high}"}, in {len(basis.ranks)} layers
- Basis: {basis.id}

By itself it computes what its base model computes. A tenant (`frozencore export ADAPTER --to tenant`) is a LoRA on the
`core` layers:

```python
import frozencore  # or frozencore_basis_model.register(): transformers knows the architecture
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{place}"), "TENANT")
```
"""


@dataclass(frozen=True)
class TenantExport:
    """The tenant that was written.

    Attributes:
        rank: The one rank of all layers; smaller cores are zero-padded to it.
        layers: The layers with a core.
        basis_id: The id of the basis.
    """

    directory: Path
    rank: int
    layers: tuple[str, ...]
    basis_id: str


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
        basis_model: Folder of the basis model, to check that its basis is the adapter's. Without
            it nothing is checked: cores on another basis give wrong outputs, and no engine notices. The tenant names it
            by this text; vLLM finds a tenant on demand only if its ``--model`` is the same text.
        dtype: The dtype of the factors. Half precision halves the file and costs about 0.2 % of the update in bfloat16.

    Raises:
        ArtifactError: The adapter is damaged, ``out`` exists, or the basis model has another basis.
        ConfigError: The adapter does not exist, or trains more than its cores.
        CalibrationError: It has no basis yet.
    """
    require_dtype(dtype)
    adapter = export_source(model_or_directory, adapter_name)
    if basis_model is not None:
        origin, there = str(adapter.folder or "This adapter"), read_entry(basis_model)["basis_id"]
        require_same_id(origin, adapter.basis_id, f"the basis model {basis_model} has", there)
    ranks, rank = adapter.ranks, adapter.rank
    with atomic_folder(
        Path(out), overwrite=overwrite, reads=[adapter.folder, adapter.config.basis, basis_model]
    ) as aside:
        ones = {f"{BASE}{name}.{CORE}.lora_A.weight": torch.eye(rank, r, dtype=dtype) for name, r in ranks.items()}
        (aside / WEIGHTS_FILE).write_bytes(_weights(ones | _cores(adapter, dtype), adapter.basis_id))
        config = lora_config(adapter.config, rank, [CORE], fan_in_fan_out=False)
        config |= {"base_model_name_or_path": None if basis_model is None else str(basis_model), "revision": None}
        (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (aside / CARD_FILE).write_text(_tenant_card(len(ranks), rank, adapter.basis_id), encoding="utf-8")
    return TenantExport(Path(out), rank, tuple(ranks), adapter.basis_id)


def tenant_weights(model: nn.Module, *, adapter_name: str | None = None, dtype: torch.dtype = torch.float32) -> bytes:
    """Return the cores as the weights file of a tenant, for an engine that takes them from memory.

    They are the tensors that :func:`export_tenant` writes, without the identity matrices A. In the engine
    :class:`frozencore_vllm.TenantWorker` reads them, and refuses cores on another basis.

    Args:
        adapter_name: Which adapter of the model; the active one by default.

    Raises:
        ConfigError: The adapter does not exist, or trains more than its cores.
        CalibrationError: It has no basis yet.
        ArtifactError: A core has values that are not finite in ``dtype``.
    """
    require_dtype(dtype)
    adapter = export_source(model, adapter_name)
    return _weights(_cores(adapter, dtype), adapter.basis_id)


def _weights(tensors: dict[str, Tensor], basis_id: str) -> bytes:
    return save(tensors, metadata={"format": "pt", ENTRY: basis_id})


def _cores(adapter: ExportSource, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    rank = adapter.rank
    for name, R in adapter.cores.items():
        B = torch.zeros(len(R), rank, dtype=torch.float64)
        B[:, : len(R)] = adapter.layers[name].scale * R.detach().cpu().double()
        key = f"{BASE}{name}.{CORE}.lora_B.weight"
        tensors[key] = in_dtype(key, B, dtype)
    return tensors


def _tenant_card(num_layers: int, rank: int, basis_id: str) -> str:
    return f"""---
library_name: peft
tags: [frozencore, lora]
---
# A tenant of a basis model

- Cores of rank {rank} in {num_layers} layers, as a LoRA on the `core` layers alone
- Basis: {basis_id}; on a basis model of another one these numbers mean nothing

vLLM serves it on its basis model: `--enable-lora --lora-target-modules core`. Stock PEFT loads it there too.
"""
