"""Which layers a run adapts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.layer import layer_shape
from frozencore.adapter.model import FrozenCoreModel
from frozencore.errors import ConfigError
from frozencore.tune.methods import Targets
from frozencore.tune.methods.bases_config import BasesConfig
from frozencore.tune.methods.targeted import targeted_layers
from frozencore.words import num_of

_BLOCK = re.compile(r"\.(\d+)\.")


def resolve_targets(config: BasesConfig, model: PreTrainedModel) -> Targets:
    """The layers to adapt: those named, or the method's own, mostly the attention projections, which the paper adapts.

    Raises:
        ConfigError: A name matches no layer, the architecture is not known and nothing was named, or the model has
            fewer blocks than are to be adapted.
    """
    targets = config.targets or config.method_entry.default_targets(model) or _attention_projections(model)
    if targets != "all-linear":
        _require_each(model, targets)
    return targets if config.layers is None else _in_last_blocks(model, targets, config.layers)


def _in_last_blocks(model: PreTrainedModel, targets: Targets, num_blocks: int) -> tuple[str, ...]:
    """The full names of the layers in the last blocks: a block is what the first number in a layer's name counts."""
    block_of = {name: int(found[1]) for name in targeted_layers(model, targets) if (found := _BLOCK.search(name))}
    there = 1 + max(block_of.values(), default=-1)
    if num_blocks > there:
        raise ConfigError(f"--layers {num_blocks} is more than the {num_of(there, 'block')} of this model.")
    return tuple(name for name, block in block_of.items() if block >= there - num_blocks)


def attention_shapes(model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """(m, n) of every attention projection; none where they are not known."""
    names = FrozenCoreModel.target_module_mapping.get(model.config.model_type, [])
    return tuple(
        layer_shape(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.rpartition(".")[2] in names
    )


def _attention_projections(model: PreTrainedModel) -> tuple[str, ...]:
    names = FrozenCoreModel.target_module_mapping.get(model.config.model_type)
    if names is None:
        raise ConfigError(
            f"The attention projections of a {model.config.model_type!r} model are not known here. "
            f"Name its layers with --targets, or use --targets all-linear. It has: {', '.join(_linear_names(model))}."
        )
    present = _linear_names(model)
    return tuple(name for name in names if name in present)


def _require_each(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse a name that matches no layer: a typo among several would otherwise go unseen."""
    present = {name for name, _ in model.named_modules()}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in present):
            raise ConfigError(
                f"--targets {target!r} matches no layer of this model. Its linear layers are called "
                f"{', '.join(_linear_names(model))}; or use all-linear."
            )


def _linear_names(model: nn.Module) -> list[str]:
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    return sorted({name.rpartition(".")[2] for name in linear})
