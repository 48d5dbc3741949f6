"""The state dict of an adapter as it is saved and as it is loaded: P, Q and R of each layer, or all cores in one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.pushed_card import keep_card_when_pushed
from frozencore.adapter.saved_rounds import make_room, with_last_cores, with_whole_cores
from frozencore.adapter.seal.factors import BASE, PREFIX, Factors
from frozencore.adapter.seal.flat_cores import FLAT, flatten_cores, with_factors
from frozencore.adapter.seal.integrity import (
    require_fit,
    require_sealed,
    require_sound,
    require_sound_cores,
)
from frozencore.adapter.seal.same_base import record_base
from frozencore.adapter.seal.values import require_finite, require_finite_in, require_modules
from frozencore.adapter.seal.written import holds_no_basis
from frozencore.adapter.uncalibrated import warn_of_uncalibrated


def state_to_save(
    model: nn.Module,
    config: FrozenCoreConfig,
    adapter_name: str,
    found: dict[str, Tensor],
    whole: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """What PEFT found of an adapter, the cores of its rounds as one, or on a named basis its cores alone; notes what
    the seal says of them, and that a push of the model keeps their card.

    Args:
        whole: The model's state dict, which holds trained modules too.

    Raises:
        ArtifactError: A factor, or a module that is saved with them, is not finite.
    """
    found = with_whole_cores(found)
    if config.basis_id is not None:
        found = {FLAT: flatten_cores(_cores_in(found))}
    modules = {key: value for key, value in whole.items() if f".modules_to_save.{adapter_name}." in key}
    plain = {key: value for key, value in (found | modules).items() if not value.is_meta}
    require_finite(f"the adapter {adapter_name!r}", plain, "It is not saved. Lower the learning rate.")
    if len(plain) == len(found | modules):
        samples = {name: layer.base_samples for name, layer in frozen_core_layers(model, adapter_name).items()}
        config.prepare_seal(found, record_base(samples) if config.basis_id is None else None)
    keep_card_when_pushed(model, config, adapter_name)
    return found


def state_to_load(
    model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """P, Q and R of every layer, checked before one of them reaches the model.

    Raises:
        ArtifactError: They are not sound, not those that were saved, or do not fit the model; or the basis of cores
            alone is not to be found.
    """
    origin, layers = f"the adapter {adapter_name!r}", frozen_core_layers(model, adapter_name)
    make_room(config, layers, adapter_name, state_dict)
    own = {name: layer.factors(adapter_name) for name, layer in layers.items()}
    seal = config.take_seal()
    require_modules(origin, config.modules_to_save, config.trainable_token_indices, state_dict)
    if FLAT in state_dict:
        require_sound_cores(origin, state_dict, config.basis_id)
        require_sealed(origin, seal, state_dict)
        on_meta = any(P.is_meta or Q.is_meta for P, Q, _ in own.values())
        for core_dtype in {R.dtype for _, _, R in own.values()}:
            require_finite_in(origin, state_dict[FLAT], core_dtype)
        bases = config.find_basis(origin).layers if on_meta else {name: (P, Q) for name, (P, Q, _) in own.items()}
        state_dict = with_factors(origin, state_dict, bases)  # which were checked when they were laid
    else:
        factors = require_sound(origin, state_dict, config.coordinates, config.rounds)
        require_sealed(origin, seal, state_dict)
        require_fit(origin, own, factors)
        if holds_no_basis(state_dict):
            warn_of_uncalibrated(f"The adapter {adapter_name!r}", "before it is trained or used")
        if config.basis_id is not None and not _same_bases(own, factors):
            config.name_basis(None)  # it has one of its own now
    state_dict = with_last_cores(state_dict, layers, adapter_name)
    for layer in layers.values():
        layer.awaits_core.discard(adapter_name)
    return state_dict


def _cores_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """R by layer name, from PEFT's state dict of one adapter, with or without the adapter's name in the keys."""
    parts = ((key.removeprefix(BASE).partition(f".{PREFIX}R"), tensor) for key, tensor in tensors.items())
    return {layer: tensor for (layer, found, _), tensor in parts if found}


def _same_bases(own: Mapping[str, tuple[Tensor, Tensor, Tensor]], came: Mapping[str, Factors]) -> bool:
    """Whether P and Q that came are the layers' own; those of a layer on the meta device are none."""
    return all(
        mine.is_meta or torch.equal(mine, theirs.to(mine.device, mine.dtype))
        for name, factors in came.items()
        for mine, theirs in zip(own[name], (factors.P, factors.Q), strict=False)
    )
