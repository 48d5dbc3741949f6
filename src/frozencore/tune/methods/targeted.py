"""Which layers of a model targets name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from frozencore.tune.methods.method import Targets

if TYPE_CHECKING:
    from torch import nn


def targeted_layers(model: nn.Module, targets: Targets) -> list[str]:
    """The full names of the layers, in the model's order; ``all-linear`` leaves the output layer out.

    A name or the end of one means linear layers; a full name also another module with parameters of its own.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if targets == "all-linear":
        head = cast(Any, model).get_output_embeddings()
        return [name for name, module in linear.items() if module is not head]
    named = set(targets)
    return [
        name
        for name, module in model.named_modules()
        if (name in named and any(True for _ in module.parameters(recurse=False)))
        or (name in linear and any(name.endswith(f".{one}") for one in targets))
    ]
