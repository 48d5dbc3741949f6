"""The tensors of an adapter between PEFT's state dict of a model and a file: both ways, with all checks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.bases import named_basis, require_fit, require_trained_alike
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import BasisState, base_samples_of, bases_of, frozen_core_layers
from frozencore.adapter.saved.adapter import require_tensors
from frozencore.adapter.saved.base_record import record_base
from frozencore.adapter.saved.basis import holds
from frozencore.adapter.saved.tensors import (
    BASE,
    CLASSIFIERS,
    PREFIX,
    cores_key,
    factors_alone,
    flatten_cores,
    foreign_tensor,
    hash_tensors,
    holds_no_basis,
    other_keys,
    require_cores_of,
    require_finite,
    require_finite_in,
    require_modules,
    require_sound,
    trained_with,
    warn_of_uncalibrated,
    with_factors,
)
from frozencore.distributed import unsharded
from frozencore.text import one_line


def tensors_to_save(
    state: Mapping[str, Tensor],
    model: nn.Module,
    config: FrozenCoreConfig,
    adapter_name: str,
    state_dict: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Turn PEFT's state dict of an adapter into the tensors of a file; refuse NaN and Inf before it is written.

    Their hash and the base model's record go into the configuration. Of a model that FSDP2 shards, every rank must
    call this.

    Args:
        state_dict: The model's, which holds trained modules too.
    """
    found = {key: unsharded(value) for key, value in state.items()}
    config.modules_to_save = _heads_there(config, model)
    layers = frozen_core_layers(model, adapter_name)
    bases = bases_of(layers, adapter_name)
    mark = f".{PREFIX}R."
    cores = {key.partition(mark)[0]: R for key, R in found.items() if mark in key}
    basis_id = named_basis(config, layers, adapter_name)
    if basis_id is None:
        config.name_basis(None)  # P and Q were changed since they were named
        for key in cores:  # P and Q may be in the state dict under the name of another adapter
            if (basis := bases.get(key.removeprefix(BASE))) is not None:
                found.setdefault(f"{key}.{PREFIX}P.{adapter_name}", basis.P)
                found.setdefault(f"{key}.{PREFIX}Q.{adapter_name}", basis.Q)
    elif cores:
        flat = flatten_cores({key.removeprefix(BASE): R for key, R in cores.items()})
        found = {cores_key(basis_id): flat}
    found |= {key: unsharded(value) for key, value in _trained_modules(model, adapter_name, state_dict).items()}
    plain = {key: value for key, value in found.items() if not value.is_meta}
    require_finite(f"the adapter {adapter_name!r}", plain, "It is not saved. Lower the learning rate.")
    if holds_no_basis(plain):
        warn_of_uncalibrated(f"The adapter {adapter_name!r} that is saved", "and save it again")
    config.tensors_sha256 = config.base_record = None
    if len(plain) == len(found):  # else they have no values yet
        if config.basis_id is None:
            config.base_record = record_base(base_samples_of(layers))
            found |= trained_with(bases, config.base_record)
        saved = {BaseTuner._remove_adapter_name_from_key(key, adapter_name): X for key, X in found.items()}
        config.tensors_sha256 = hash_tensors(saved)
    return _TensorsToSave(found)


def tensors_to_load(
    model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Turn the tensors of a file into P, Q, R and trained modules, with all checks before the model changes."""
    origin, layers = f"the adapter {adapter_name!r}", frozen_core_layers(model, adapter_name)
    own = {name: layer.factors(adapter_name) for name, layer in layers.items()}
    bases = bases_of(layers, adapter_name)
    require_modules(origin, _heads_there(config, model), config.trainable_token_indices, state_dict)
    trained = _keys_of_trained_modules(model, adapter_name)
    for key in other_keys(state_dict):
        if key.removeprefix(BASE) not in trained:
            raise foreign_tensor(origin, key)
    basis_id = named_basis(config, layers, adapter_name)
    factors = require_sound(origin, state_dict, coordinates=config.coordinates, basis_id=basis_id)
    if config.load_bases:  # other weights may be loaded later
        saved = {trained.get(key.removeprefix(BASE), key): X for key, X in state_dict.items()}
        require_tensors(origin, config.tensors_sha256, saved)
    if factors is None:
        for core_dtype in {R.dtype for _, _, R in own.values()}:
            require_finite_in(origin, require_cores_of(origin, state_dict, basis_id), core_dtype)
        if any(X.is_meta for P, Q, _ in bases.values() for X in (P, Q)):
            named = config.find_basis(origin).layers
            assert basis_id is not None
            for name, layer in layers.items():
                layer.name_basis(adapter_name, basis_id, named[name].to(bases[name].P.dtype))
            state_dict = with_factors(origin, state_dict, named)
        else:
            state_dict = with_factors(origin, state_dict, bases)
    else:
        require_fit(origin, factors, own, _way_out(factors.keys() ^ own.keys(), config.base_model_name_or_path))
        require_trained_alike(origin, state_dict, config, layers, bases)
        state_dict = factors_alone(state_dict)
        if holds_no_basis(state_dict):
            warn_of_uncalibrated(f"The adapter {adapter_name!r}", "before it is trained or used")
        if basis_id is not None and not all(holds(bases[name], P, Q) for name, (P, Q, _) in factors.items()):
            config.name_basis(None)  # the loaded bases are not the named basis
    config.load_bases = False
    for layer in layers.values():
        layer.frozencore_state[adapter_name] = BasisState.UNKNOWN  # until the tensors are there
    return state_dict


class _TensorsToSave(dict[str, Tensor]):
    """All tensors of an adapter. PEFT adds embeddings and heads of the base model to them, which are left out."""

    def update(self, added: Mapping[str, Tensor]) -> None:  # type: ignore[override]  # as PEFT calls it
        inner = (".base_layer.", ".original_module.", ".modules_to_save.", ".token_adapter.", f".{PREFIX}")
        if plain := [key for key in added if key not in self and not any(part in key for part in inner)]:
            warnings.warn(
                f"The base model's {plain[0]!r} is not saved with the adapter, even if it was resized: save the base "
                "model too, or name the module in modules_to_save.",
                stacklevel=2,
            )


def _trained_modules(model: nn.Module, adapter_name: str, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that ``modules_to_save`` and ``trainable_token_indices`` name, as PEFT saves them."""
    found: dict[str, Tensor] = {}
    for name, module in _wrappers(model):
        inside = {key.removeprefix(f"{name}."): X for key, X in state_dict.items() if key.startswith(f"{name}.")}
        found |= {f"{name}.{key}": X for key, X in module.adapter_state_dict(adapter_name, inside).items()}
    return found


def _keys_of_trained_modules(model: nn.Module, adapter_name: str) -> dict[str, str]:
    """The names in a file, by those under which PEFT loads it, of what is trained beside the cores."""
    return {
        f"{name}.{key}".removeprefix(BASE): f"{name}.{saved}"
        for name, module in _wrappers(model)
        for saved, key in module.adapter_state_dict_load_map(adapter_name).items()
    }


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            yield name.removeprefix("_fsdp_wrapped_module."), module


def _heads_there(config: FrozenCoreConfig, model: nn.Module) -> list[str] | None:
    """``modules_to_save`` without the names that PEFT adds for every classifier, if the model has neither head."""
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if there.isdisjoint(CLASSIFIERS):
        return [name for name in config.modules_to_save or () if name not in CLASSIFIERS] or None
    return config.modules_to_save


def _way_out(odd: Iterable[str], base: str | None) -> str:
    """What to do with an adapter of other layers or shapes.

    Args:
        odd: The layers that are on one side only.
    """
    if any("_orig_mod" in name for name in odd):
        return (
            "The adapter was added to a compiled model, there or here, so its layers have other names. Call "
            "torch.compile on the model with its adapter, or load a base that is compiled in the same places."
        )
    return f"Load the base model that it was trained on{f': {one_line(base, 200)}' if base else ''}."
