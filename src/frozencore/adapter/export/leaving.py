"""The adapter that is exported: of a model in memory, or of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.export.lora_layers import BaseLayers, layers_of
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.saved.folder import read_tensors
from frozencore.adapter.saved.tensors import PREFIX, Factors, layer_factors
from frozencore.errors import ConfigError


@dataclass(frozen=True)
class LeavingAdapter:
    """P, Q, R and s by layer name, and the base model's layers where they are known."""

    config: FrozenCoreConfig
    factors: dict[str, Factors]
    scales: dict[str, float]
    base: BaseLayers | None


def leaving_adapter(
    model_or_directory: nn.Module | str | Path, adapter_name: str | None, base: nn.Module | str | Path | None
) -> LeavingAdapter:
    """An adapter of a model or of a folder; see :func:`from_model` and :func:`from_directory`."""
    if isinstance(model_or_directory, nn.Module):
        return from_model(model_or_directory, adapter_name)
    return from_directory(Path(model_or_directory), base)


def from_model(model: nn.Module, adapter_name: str | None) -> LeavingAdapter:
    """An adapter of a model; the active one by default.

    Raises:
        ConfigError: There is none of that name, or none by itself.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    known = [name for name, config in configs.items() if isinstance(config, FrozenCoreConfig)]
    wanted = known if adapter_name is None else [adapter_name]
    if len(wanted) > 1:
        active = getattr(model, "active_adapters", None)
        names = active() if callable(active) else active or ()
        wanted = [name for name in names if name in known]
    if len(wanted) != 1 or wanted[0] not in known:
        raise ConfigError(
            f"One frozen-core adapter is exported at a time, but {wanted or 'none'} came and the model has "
            f"{known or 'none'}. Name it with adapter_name."
        )
    layers = frozen_core_layers(model, wanted[0])
    return LeavingAdapter(
        config=configs[wanted[0]],
        factors={name: Factors(*layer.factors(wanted[0])) for name, layer in layers.items()},
        scales={name: layer.frozencore_scale[wanted[0]] for name, layer in layers.items()},
        base=layers_of(model),
    )


def from_directory(folder: Path, base: nn.Module | str | Path | None = None) -> LeavingAdapter:
    """An adapter that ``save_pretrained`` wrote.

    Args:
        base: The base model, its folder or its GGUF file; by default what the adapter names, if it lies here.

    Raises:
        ArtifactError: It is damaged.
        ConfigError: It holds more than factors.
    """
    config, tensors = read_tensors(folder)
    factors = layer_factors(str(folder), tensors)
    others = [key for key in tensors if f".{PREFIX}" not in key]
    if others:
        raise ConfigError(f"{folder} also holds {others[0]!r}, {_NOT_LORA}")
    said = config.base_model_name_or_path
    base = base if base is not None else said if said and Path(said).exists() else None
    scales = {name: config.scale_of(name) for name in factors}
    return LeavingAdapter(config, factors, scales, layers_of(base) if base is not None else None)


_NOT_LORA = "which no LoRA can hold. Merge the adapter into its model instead (frozencore export --to merged)."


def require_cores_only(adapter: LeavingAdapter) -> None:
    """Refuse an adapter that trains more than cores, or has no basis yet.

    Raises:
        ConfigError: Which.
    """
    config = adapter.config
    if config.modules_to_save:
        raise ConfigError(f"The adapter trains whole modules too ({', '.join(config.modules_to_save)}), {_NOT_LORA}")
    if config.trainable_token_indices:
        raise ConfigError(f"The adapter trains single token embeddings too, {_NOT_LORA}")
    require_bases(adapter.factors)


def require_bases(factors: Mapping[str, Factors]) -> None:
    """Refuse layers without a basis.

    Raises:
        ConfigError: The first of them.
    """
    empty = [name for name, own in factors.items() if not bool(own.P.any())]
    if empty:
        raise ConfigError(
            f"Layer {empty[0]!r} has no basis yet, so there is nothing to export. "
            "Call frozencore.calibrate(model, dataloader) first."
        )
