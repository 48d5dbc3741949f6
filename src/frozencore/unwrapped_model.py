"""The base model inside of PEFT's wrappers: the model, its names and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper


def base_of(model: Any) -> Any:
    """The model inside a PEFT model or its tuner (its layers have the adapters), or the model itself."""
    if isinstance(model, BaseTuner):
        return model.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's weights and buffers, by their names without adapters."""
    tensors = base_of(model).state_dict()
    return ((plain, tensors[name]) for name, plain in _base_names(base_of(model), tensors))


def base_names(model: torch.nn.Module) -> list[str]:
    """The names of :func:`base_tensors`, found without a state dict.

    When bitsandbytes makes one, it rewrites the 4-bit weights of a model that was evaluated.
    """
    base = base_of(model)
    names = (name for name, _ in chain(base.named_parameters(), base.named_buffers()))
    return [plain for _, plain in _base_names(base, names)]


def _base_names(base: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that belong to the plain model, each with its name there."""
    inner_of = {  # the attribute in which a PEFT module stores the plain module
        name: "base_layer" if isinstance(module, BaseTunerLayer) else "original_module"
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }
    for name in names:
        if not any(
            name.startswith(f"{layer}.") and not name.startswith(f"{layer}.{inner}.")
            for layer, inner in inner_of.items()
        ):
            yield name, name.replace(".base_layer.", ".").replace(".original_module.", ".")
