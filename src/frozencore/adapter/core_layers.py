"""The layers of a model that have an adapter, and a model that computes with one adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.quiet import with_attributes


@contextmanager
def only_adapter(model: nn.Module, adapter_name: str, *, with_cores: bool = True) -> Iterator[None]:
    """Compute with one adapter and the modules that it trains inside; with_cores=False leaves out its cores."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                is_off = isinstance(module, BaseTunerLayer) and adapter_name not in module._get_available_adapters()
                is_off |= isinstance(module, FrozenCoreLinear) and not with_cores
                undo.enter_context(with_attributes(module, _disable_adapters=is_off, _active_adapter=[adapter_name]))
        yield


def frozen_core_layers(model: nn.Module, adapter_name: str) -> dict[str, FrozenCoreLinear]:
    """The layers that have an adapter, by their name in the base model."""
    layers = (module for module in model.modules() if isinstance(module, FrozenCoreLinear))
    return {layer.name: layer for layer in layers if adapter_name in layer.frozencore_R}
