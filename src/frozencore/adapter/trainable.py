"""The trained parameters of a model with frozen cores: r² values a layer, and named modules."""

from __future__ import annotations

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.errors import ConfigError


def require_own_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that the active frozen-core adapters train; refuses frozen cores and other trained parameters."""
    cores: list[Tensor] = []
    named: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, FrozenCoreLayer):
            cores += [module.core(name) for name in module.active_adapters if name in module.frozencore_R]
        elif isinstance(module, AuxiliaryTrainingWrapper):
            parameters = module.named_parameters()
            named += [p for name, p in parameters if not set(name.split(".")).isdisjoint(module.active_adapters)]
    if not cores:
        return []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    frozen = [names[id(core)] for core in cores if not core.requires_grad]
    if frozen:
        raise ConfigError(
            f"Every core of an active adapter trains, but {frozen[0]!r} is frozen ({len(frozen)} of {len(cores)}). "
            "Call set_adapter(name) on the model, or load the adapter with is_trainable=True."
        )
    own = {id(parameter) for parameter in [*cores, *named]}
    foreign = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in own]
    if foreign:
        raise ConfigError(
            f"A frozen-core adapter trains its cores, {sum(core.numel() for core in cores):,} values, but "
            f"{names[id(foreign[0])]!r} trains as well ({len(foreign)} parameters of "
            f"{sum(p.numel() for p in foreign):,} values in all). Freeze it with requires_grad_(False), or name its "
            "module in modules_to_save."
        )
    return [parameter for parameter in [*cores, *named] if parameter.requires_grad]


def require_float32(model: nn.Module) -> None:
    """Refuse a model without trainable parameters, or with some that are not float32."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("Training needs trainable parameters, but this model has none. Add an adapter first.")
    for name, parameter in trainable.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"Trainable parameters must be float32 (the frozen ones need not be), but {name!r} is "
                f"{parameter.dtype}. Add the adapter with autocast_adapter_dtype=True, or load the model in float32."
            )
