"""The adapter that new bases go to, what forbids them (merged weights, cores that have learned, too few tokens), and
the plain base model under all adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.constructors import LayerEvidence
from frozencore.errors import CalibrationError, ConfigError


def adapter_for_new_bases(
    model: nn.Module, adapter_name: str | None, *, reset: bool
) -> tuple[str, FrozenCoreConfig, dict[str, FrozenCoreLayer]]:
    """Name, configuration and layers of an adapter whose bases may be chosen now.

    Args:
        adapter_name: None is the active one.
        reset: Also if its cores have been trained.

    Raises:
        ConfigError: The model has no such frozen-core adapter.
        CalibrationError: An adapter is merged, or a core has been trained and ``reset`` is not given.
    """
    adapter_name, config = find_adapter(model, adapter_name)
    layers = frozen_core_layers(model, adapter_name)
    _refuse_merged(model)
    if not reset:
        _refuse_trained(layers, adapter_name)
    return adapter_name, config, layers


def find_adapter(model: nn.Module, adapter_name: str | None) -> tuple[str, FrozenCoreConfig]:
    """Name and configuration of a frozen-core adapter; the active one by default.

    Raises:
        ConfigError: The model has no such adapter.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if adapter_name is None and configs:  # a model of transformers without adapters raises for its active ones
        active = getattr(model, "active_adapters", None)
        names = active() if callable(active) else active
        adapter_name = next(iter(names or configs), None)
    config = configs.get(adapter_name) if adapter_name is not None else None
    if adapter_name is None or not isinstance(config, FrozenCoreConfig):
        known = [name for name, other in configs.items() if isinstance(other, FrozenCoreConfig)]
        if known:
            raise ConfigError(
                f"{adapter_name!r} is no frozen-core adapter of this model, which has {', '.join(map(repr, known))}. "
                "Give one of these as adapter_name."
            )
        raise ConfigError(
            "Bases belong to a frozen-core adapter, but this model has none. "
            "Call peft.get_peft_model(model, FrozenCoreConfig(...)) first."
        )
    return adapter_name, config


def _refuse_merged(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and layer.merged:
            raise CalibrationError(
                f"Calibration looks at the base weights, but layer {name!r} has an adapter merged into them. "
                "Call unmerge_adapter() first."
            )


def _refuse_trained(layers: Mapping[str, FrozenCoreLayer], adapter_name: str) -> None:
    for name, layer in layers.items():
        if bool(layer.factors(adapter_name)[2].any()):
            raise CalibrationError(
                f"The core of layer {name!r} is not zero: a new basis under it would change what it means. "
                "Pass reset=True to give up what it learned."
            )


def require_tokens(evidence: LayerEvidence, rank: int) -> None:
    """Refuse a layer that too few tokens reached.

    Raises:
        CalibrationError: Fewer than the rank.
    """
    if evidence.moments is not None and evidence.moments.num_tokens < rank:
        raise CalibrationError(
            f"A basis of rank {rank} needs at least {rank} counted tokens, but layer {evidence.name!r} received "
            f"{evidence.moments.num_tokens}. Calibrate on more text."
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The plain base model, whatever adapters and ``modules_to_save`` are active on it."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled
