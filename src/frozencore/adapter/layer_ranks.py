"""Set the ranks of a rank budget in the layers of a model and in the adapter's configuration."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.constructors.basis_options import trained_values
from frozencore.maths.allocation import uniform_ranks


def layers_to_share(model: nn.Module, adapter_name: str, config: FrozenCoreConfig) -> dict[str, FrozenCoreLayer]:
    """The layers that share a rank budget, by name, including layers with rank 0."""
    layers = (module for module in model.modules() if isinstance(module, FrozenCoreLayer))
    return {
        layer.name: layer
        for layer in layers
        if adapter_name in layer.frozencore_R or config.rank_pattern.get(layer.name) == 0
    }


def give_ranks(
    adapter_name: str, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLayer], ranks: Mapping[str, int]
) -> None:
    """Resize an adapter; resized factors become zero, and rank 0 removes the adapter from a layer."""
    config.rank_pattern = dict(ranks)
    for name, layer in layers.items():
        trains = not config.inference_mode and adapter_name in layer.active_adapters
        layer.resize(adapter_name, ranks[name], config.scale_of(name) if ranks[name] else 0.0, trains=trains)


def spread_evenly(adapter_name: str, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLayer]) -> None:
    """Give all layers equal ranks within the budget; a constructor with gains changes them in calibration."""
    assert config.rank_budget is not None
    is_final = not config.constructor_entry.has_gains
    budget = trained_values(config.rank_budget)
    shapes = {name: layer.shape for name, layer in layers.items()}
    ranks = uniform_ranks(shapes, budget if is_final else max(budget, len(shapes)))
    give_ranks(adapter_name, config, layers, ranks)
    if not is_final:
        config.rank_pattern = {}
