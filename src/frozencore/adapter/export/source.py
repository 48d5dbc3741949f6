"""The adapter that is exported, from a model in memory or from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.export.base_model import BaseLayers, layers_of
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.model import find_adapter
from frozencore.adapter.saved.folder import read_tensors
from frozencore.adapter.saved.tensors import PREFIX, Factors, layer_factors
from frozencore.errors import ArtifactError, ConfigError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that serving engines read."""
_NOT_LORA = "which no LoRA can hold. Merge the adapter into its model instead (frozencore export --to merged)."


@dataclass(frozen=True)
class ExportSource:
    """P, Q, R and s by layer name, and the base model's layers if they are known."""

    config: FrozenCoreConfig
    factors: dict[str, Factors]
    scales: dict[str, float]
    base: BaseLayers | None
    folder: Path | None


def export_source(
    model_or_directory: nn.Module | str | Path,
    adapter_name: str | None = None,
    base: nn.Module | str | Path | None = None,
) -> ExportSource:
    """Read the factors of an adapter of a model, or of a folder that ``save_pretrained`` wrote.

    Args:
        adapter_name: The adapter of the model; the active one by default.
        base: The base model, its folder or its GGUF file, for an adapter in a folder; by default the one that the
        adapter names, if it is on this machine.
    """
    if isinstance(model_or_directory, nn.Module):
        name, config = find_adapter(model_or_directory, adapter_name)
        layers = frozen_core_layers(model_or_directory, name)
        factors = {each: Factors(*layer.factors(name)) for each, layer in layers.items()}
        scales = {each: layer.frozencore_scale[name] for each, layer in layers.items()}
        source = ExportSource(config, factors, scales, layers_of(model_or_directory), None)
    else:
        folder = Path(model_or_directory)
        config, tensors = read_tensors(folder)
        factors = layer_factors(str(folder), tensors)
        others = [key for key in tensors if f".{PREFIX}" not in key]
        if others:
            raise ConfigError(f"{folder} also holds {others[0]!r}, {_NOT_LORA}")
        named = config.base_model_name_or_path
        base = base if base is not None else named if named and Path(named).exists() else None
        scales = {each: config.scale_of(each) for each in factors}
        source = ExportSource(config, factors, scales, layers_of(base) if base is not None else None, folder)
    if config.modules_to_save:
        raise ConfigError(f"The adapter trains whole modules too ({', '.join(config.modules_to_save)}), {_NOT_LORA}")
    if config.trainable_token_indices:
        raise ConfigError(f"The adapter trains single token embeddings too, {_NOT_LORA}")
    require_bases(source.factors)
    return source


def require_bases(factors: Mapping[str, Factors]) -> None:
    """Refuse factors without a basis."""
    empty = [name for name, own in factors.items() if not bool(own.P.any())]
    if empty:
        raise ConfigError(
            f"Layer {empty[0]!r} has no basis yet, so there is nothing to export. "
            "Call frozencore.calibrate(model, dataloader) first."
        )


def in_dtype(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to another dtype; refuse values that are not finite in it."""
    found = values.to(dtype).contiguous()
    if not torch.isfinite(found).all():
        raise ArtifactError(f"{name!r} would hold NaN or Inf in {dtype}. Train again, or export in float32.")
    return found


def require_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that no engine reads."""
    if dtype not in DTYPES:
        raise ConfigError(f"Serving engines read float32, float16 and bfloat16 factors, but {dtype} came.")
