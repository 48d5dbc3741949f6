"""A frozen core as a plain LoRA directory: ``A = Qᵀ``, ``B = s·P R``, so that ``B A = s·P R Qᵀ`` exactly.

With a rank of its own, the best LoRA of that rank in Frobenius norm: that of the leading singular triples.

Shapes: m out features, n in features, r rank; ``lora_A.weight`` is r x n, ``lora_B.weight`` m x r. What stock PEFT,
vLLM, SGLang and llama.cpp ask of such a directory is in :mod:`frozencore.adapter.export.serving`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.export.leaving import LeavingAdapter, leaving_adapter, require_cores_only
from frozencore.adapter.export.lora_layers import layers_to_name, target_modules
from frozencore.adapter.saved.card import num_tokens, write_model_card
from frozencore.adapter.saved.tensors import Factors
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from frozencore.files.whole_file import whole_folder

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LoraExport:
    """What was written.

    Attributes:
        rank: The one rank of all layers; smaller cores are zero-padded to it.
        layers: Layers that carry an update.
        zero_layers: Layers that are there with zero factors because engines pack them with others.
        fan_in_fan_out: The base has ``Conv1D`` layers (GPT-2), which only PEFT reads.
        error: What a rank below the adapter's own left out: Frobenius norm over that of the whole update; None where
            nothing was left out.
    """

    directory: Path
    rank: int
    layers: tuple[str, ...]
    zero_layers: tuple[str, ...]
    fan_in_fan_out: bool
    error: float | None = None


def export_lora(
    model_or_directory: nn.Module | str | Path,
    out: str | Path,
    *,
    adapter_name: str | None = None,
    base: nn.Module | str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    overwrite: bool = False,
) -> LoraExport:
    """Write a frozen-core adapter as a LoRA directory that gives the same outputs without this package.

    Args:
        model_or_directory: A model with a frozen-core adapter, or a folder that ``save_pretrained`` wrote.
        adapter_name: Which adapter of the model; the active one by default.
        base: With a folder: the base model or its folder, for the shapes of layers that engines pack with adapted
            ones. By default the folder that the adapter names, if it is there.
        dtype: Of the factors. Half precision halves the files and costs about 0.2 % of the update in bfloat16.
        rank: A lower rank than the adapter's, such as a refreshed one's, which is the sum of its rounds'. What that
            costs is the result's ``error``.
        overwrite: Replace an adapter folder that is there.

    Raises:
        ArtifactError: A folder that is damaged, of another base model, or in the way.
        ConfigError: A rank below 1, no such adapter, one without a basis, or one that trains more than its cores.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"Serving engines read float32, float16 and bfloat16 factors, but {dtype} came.")
    adapter = leaving_adapter(model_or_directory, adapter_name, base)
    folder = None if isinstance(model_or_directory, nn.Module) else Path(model_or_directory)
    require_cores_only(adapter)
    shapes = {name: (f.P.shape[0], f.Q.shape[0]) for name, f in adapter.factors.items()}
    named = layers_to_name(shapes, adapter.base)
    adapter, rank, error = to_rank(adapter, rank)
    conv1d = adapter.base is not None and not adapter.base.conv1d.isdisjoint(adapter.factors)
    with whole_folder(Path(out), overwrite=overwrite, reads=folder) as aside:
        save_file(_lora_tensors(adapter, named, rank, dtype), aside / WEIGHTS_FILE, metadata={"format": "pt"})
        config = lora_config(adapter.config, rank, target_modules(named, adapter.base), fan_in_fan_out=conv1d)
        (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        write_model_card(aside, calibration=num_tokens(adapter.config.calibration_tokens))
    return LoraExport(
        directory=Path(out),
        rank=rank,
        layers=tuple(shapes),
        zero_layers=tuple(name for name in named if name not in shapes),
        fan_in_fan_out=conv1d,
        error=error,
    )


def to_rank(adapter: LeavingAdapter, rank: int | None) -> tuple[LeavingAdapter, int, float | None]:
    """The adapter with at most that rank in each layer, the rank that a LoRA of it has, and what the cut leaves out.

    Raises:
        ConfigError: A rank below 1.
    """
    if rank is not None and (not isinstance(rank, int) or rank < 1):
        raise ConfigError(f"A LoRA has a rank of at least 1, but {rank!r:.50} came.")
    own_rank = max(factors.R.shape[0] for factors in adapter.factors.values())
    if rank is None or rank >= own_rank:
        return adapter, own_rank, None
    cut, error = _cut(adapter, rank)
    return cut, rank, error


def _cut(adapter: LeavingAdapter, rank: int) -> tuple[LeavingAdapter, float]:
    """The same with at most that rank in each layer, and the relative error of all layers together."""
    cut, kept, lost = {}, 0.0, 0.0
    for name, factors in adapter.factors.items():
        cut[name], S = best_of_rank(factors, rank)
        squares = (S * adapter.scales[name]).square()
        kept, lost = kept + float(squares[:rank].sum()), lost + float(squares[rank:].sum())
    return replace(adapter, factors=cut), (lost / (kept + lost)) ** 0.5 if lost else 0.0


def best_of_rank(factors: Factors, rank: int) -> tuple[Factors, Tensor]:
    """The leading singular triples of ``P R Qᵀ`` as P, R (diagonal) and Q, in float64, and all singular values."""
    P, Q, R = (X.detach().cpu().double() for X in (factors.P, factors.Q, factors.R))
    left, right = torch.linalg.qr(P), torch.linalg.qr(Q)
    U, S, Vh = torch.linalg.svd(left.R @ R @ right.R.mT)
    return Factors(left.Q @ U[:, :rank], right.Q @ Vh[:rank].mT, S[:rank].diag()), S


def lora_factors(factors: Factors, scale: float, rank: int) -> tuple[Tensor, Tensor]:
    """A (rank x n) = Qᵀ and B (m x rank) = s·P R in float64, zero-padded to ``rank``."""
    P, Q, R = (X.detach().cpu().double() for X in (factors.P, factors.Q, factors.R))
    missing = rank - R.shape[0]
    return pad(Q.mT, (0, 0, 0, missing)), pad(scale * P @ R, (0, missing))


def _lora_tensors(
    adapter: LeavingAdapter, named: Mapping[str, tuple[int, int]], rank: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (m, n) in named.items():
        A, B = torch.zeros(rank, n), torch.zeros(m, rank)
        if name in adapter.factors:
            A, B = lora_factors(adapter.factors[name], adapter.scales[name], rank)
        for side, X in (("A", A), ("B", B)):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = X.to(dtype).contiguous()
    bad = [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ArtifactError(f"{bad[0]!r} would hold NaN or Inf in {dtype}. Train again, or export in float32.")
    return tensors


def lora_config(config: FrozenCoreConfig, rank: int, targets: list[str], *, fan_in_fan_out: bool) -> dict[str, Any]:
    """Every field that an engine reads, said outright; the scale is in B, so alpha over r is one."""
    task = getattr(config.task_type, "value", config.task_type)
    return {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": config.base_model_name_or_path,
        "revision": config.revision, "auto_mapping": config.auto_mapping, "inference_mode": True,
        "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "target_modules": targets, "fan_in_fan_out": fan_in_fan_out,
        "bias": "none", "modules_to_save": None, "init_lora_weights": True,
    }  # fmt: skip
