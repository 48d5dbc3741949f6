"""``add_weighted_adapter``: the sum of adapters that a model holds, as one adapter more."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.named_basis import Placed, require_one_basis
from frozencore.errors import ConfigError
from frozencore.maths.basis import known_basis
from frozencore.maths.linalg import weighted_sum

if TYPE_CHECKING:
    from frozencore.adapter.model import FrozenCoreModel


def add_weighted_sum(tuner: FrozenCoreModel, adapters: Sequence[str], weights: Sequence[float], name: str) -> None:
    """Add the adapter ``Σ wᵢ Rᵢ`` on the basis of the others; all is as before where they have none in common.

    Raises:
        ConfigError: No such adapter, not as many weights, trained modules besides cores.
        ArtifactError: The adapters have other layers, bases, ranks or scales.
    """
    missing = [adapter for adapter in adapters if adapter not in tuner.peft_config]
    if missing or not adapters:
        raise ConfigError(
            f"A sum is of adapters that are there ({', '.join(tuner.peft_config)}), but {missing or 'none'} came."
        )
    for adapter in adapters:
        tuner.peft_config[adapter].require_one_round("A sum")
        if tuner.peft_config[adapter].trains_modules:
            raise ConfigError(f"Only cores are summed, but the adapter {adapter!r} trained other modules too.")
    layers, first = {adapter: frozen_core_layers(tuner, adapter) for adapter in adapters}, adapters[0]
    for other in adapters:
        require_one_basis(repr(first), _placed(layers[first], first), repr(other), _placed(layers[other], other))
    sums = {
        layer_name: weighted_sum([layer.factors(adapter)[2] for adapter in adapters], weights)
        for layer_name, layer in layers[first].items()
    }
    tuner.peft_config[name] = copy.deepcopy(tuner.peft_config[first])
    tuner.peft_config[name].load_bases = True  # none is built
    tuner.inject_adapter(tuner.model, name)
    for layer_name, layer in layers[first].items():
        layer.set_basis(name, known_basis(*layer.factors(first)[:2]))
        with torch.no_grad():
            layer.factors(name)[2].copy_(sums[layer_name])
        layer.awaits_core.discard(name)


def _placed(layers: Mapping[str, FrozenCoreLayer], adapter: str) -> dict[str, Placed]:
    return {name: (*layer.factors(adapter)[:2], layer.frozencore_scale[adapter]) for name, layer in layers.items()}
