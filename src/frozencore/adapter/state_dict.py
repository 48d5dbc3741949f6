"""The tensors of an adapter between PEFT's state dict of a model and a file: a core, and P and Q if no folder has them.

    frozencore_core_<basis id>                      the core (:mod:`frozencore.adapter.core`)
    base_model.model.<layer>.frozencore_P (and _Q)  the basis, unless it is saved in a folder

and what ``modules_to_save`` and ``trainable_token_indices`` name. The scales and the record of the base model are in
the configuration. They are part of the basis id, so a core that is loaded without its configuration, as ``Trainer``
resumes, still refuses another scale or base model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.basis import Basis, are_set, ranks_of, require_same_id
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.core import BASE, CORE, Core, is_core_key
from frozencore.adapter.layer import PREFIX, BasisState, warn_of_uncalibrated
from frozencore.adapter.loaded_adapter import LoadedAdapter, frozen_core_layers
from frozencore.adapter.loaded_basis import require_fit
from frozencore.distributed import unsharded
from frozencore.errors import ArtifactError
from frozencore.maths.basis import LayerBasis, known_basis
from frozencore.text import one_line

CLASSIFIERS = ("classifier", "score")  # PEFT lists both for every classifier, which has one of them
HEADS = {"SEQ_CLS": CLASSIFIERS, "TOKEN_CLS": CLASSIFIERS, "QUESTION_ANS": ("qa_outputs",)}
"""Layers that PEFT trains beside an adapter of a task, whether ``modules_to_save`` names them or not."""
_FACTOR = re.compile(rf"(?P<layer>.+)\.{PREFIX}(?P<side>[PQ])")


def basis_tensors(basis: Basis, prefix: str = BASE) -> dict[str, Tensor]:
    """P and Q by their names in an adapter's file.

    Args:
        prefix: Empty for a model without PEFT's wrapper: transformers adds it when it saves.
    """
    layers = ((f"{prefix}{name}.{PREFIX}", factors) for name, factors in basis.layers.items())
    return {f"{key}{side}": X.detach() for key, factors in layers for side, X in (("P", factors.P), ("Q", factors.Q))}


def layers_in(tensors: Mapping[str, Tensor], scale_of: Callable[[str], float]) -> dict[str, LayerBasis]:
    """P, Q and s by layer name among the tensors of an adapter's file; empty if its basis has a folder.

    Args:
        scale_of: Returns s of a layer by its name.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if part := _FACTOR.fullmatch(key.removeprefix(BASE)):
            found.setdefault(part["layer"], {})[part["side"]] = tensor
    if alone := next((name for name, factors in found.items() if len(factors) < 2), None):
        raise ArtifactError(
            f"A basis is P and Q of each layer, but {alone!r} has one of them. Save or download it again."
        )
    return {name: known_basis(factors["P"], factors["Q"], scale_of(name)) for name, factors in found.items()}


def module_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter's file that are neither the core nor P and Q: those of trained modules and tokens."""
    names = (key for key in tensors if not is_core_key(key) and not _FACTOR.fullmatch(key.removeprefix(BASE)))
    return {key: tensors[key] for key in names}


def tensors_to_save(
    state: Mapping[str, Tensor],
    model: nn.Module,
    config: FrozenCoreConfig,
    adapter_name: str,
    state_dict: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Turn PEFT's state dict of an adapter into the tensors of a file, and name their basis in the configuration.

    Of a model that FSDP2 shards, every rank must call this.

    Args:
        state_dict: The model's, which has trained modules too.
    """
    config.modules_to_save = _heads_there(config, model)
    adapter = LoadedAdapter(adapter_name, config, frozen_core_layers(model, adapter_name))
    for layer in adapter.layers.values():
        layer.require_plain_core(adapter_name)
    mark = f".{PREFIX}R."
    cores = {key.partition(mark)[0].removeprefix(BASE): unsharded(R) for key, R in state.items() if mark in key}
    if len(cores) < len(adapter.layers):
        raise ArtifactError(
            f"An adapter is saved whole, but the state dict has {len(cores)} of its {len(adapter.layers)} cores. Give "
            "the state dict of the whole model, or none."
        )
    tensors = {key: unsharded(value) for key, value in _trained_modules(model, adapter_name, state_dict).items()}
    if any(X.is_meta for X in (*cores.values(), *(factors.P for factors in adapter.bases.values()))):
        values = torch.empty(sum(R.numel() for R in cores.values()), device="meta")  # names and shapes alone
        return _TensorsToSave({f"{CORE}{config.basis_id}": values, **tensors})
    if config.basis is None or not adapter.has_basis(config.basis_id):
        basis = adapter.make_basis()  # P and Q may have been changed since they had a folder
        if not basis.is_set:
            warn_of_uncalibrated(f"The adapter {adapter_name!r} that is saved", "and save it again")
        config.attach_basis_id(basis.id)
        config.base_record = None if basis.base is None else dict(basis.base)
        adapter.attach_id(basis)
        tensors |= basis_tensors(basis, BASE if all(key.startswith(BASE) for key in state) else "")
    assert config.basis_id is not None
    return _TensorsToSave({**Core.of(config.basis_id, cores).tensors, **tensors})


def tensors_to_load(
    model: nn.Module, config: FrozenCoreConfig, adapter_name: str, state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Turn the tensors of a file into P, Q, R and trained modules, checked before the model changes."""
    adapter = LoadedAdapter(adapter_name, config, frozen_core_layers(model, adapter_name))
    origin, here = f"The adapter {adapter_name!r}", adapter.bases
    core = Core.read(origin, state_dict)
    known = adapter.basis_id if are_set(here) else None
    other = None if core.basis_id == known else _other_basis(origin, core, adapter, state_dict)
    if other is not None:
        here = dict(other.layers)
    cores = core.by_layer(ranks_of(here))
    if other is not None:
        _expect_basis(origin, adapter, other)
    config.load_bases = False
    loaded = module_tensors(state_dict)
    for name, R in cores.items():
        key = f"{BASE}{name}.{PREFIX}"
        loaded |= {f"{key}{side}.{adapter_name}": X for side, X in (("P", here[name].P), ("Q", here[name].Q))}
        loaded[f"{key}R.{adapter_name}.weight"] = R.clone()
        adapter.layers[name].frozencore_state[adapter_name] = BasisState.UNKNOWN  # until the tensors are there
    return loaded


def _expect_basis(origin: str, adapter: LoadedAdapter, basis: Basis) -> None:
    """Name the basis that a model's state dict is about to bring in the layers and in the configuration."""
    config = adapter.config
    adapter.attach_id(basis, will_load=basis.layers)
    if basis.place is None:
        if basis.is_set and not config.load_bases:  # the configuration did not come with the file
            warnings.warn(
                f"{origin} takes P and Q of a file, but its configuration and card tell nothing of how they were "
                "made. Load adapter and configuration together before training goes on: "
                "PeftModel.from_pretrained(base, CHECKPOINT, is_trainable=True).",
                stacklevel=3,
            )
        config.attach_basis_id(basis.id)
        config.base_record = None if basis.base is None else dict(basis.base)
    if not basis.is_set:
        warn_of_uncalibrated(origin, "before it is trained or used")
    config.basis_id = basis.id


def _other_basis(origin: str, core: Core, adapter: LoadedAdapter, tensors: Mapping[str, Tensor]) -> Basis:
    """Find the basis of a core whose adapter has another one: beside the core, or where the configuration names it."""
    config = adapter.config
    scales = {name: layer.frozencore_scale[adapter.name] for name, layer in adapter.layers.items()}
    beside = layers_in(tensors, lambda name: scales.get(name, 1.0))
    if not beside:
        here = adapter.attached_id if config.basis is None else config.basis_id
        require_same_id(origin, core.basis_id, "the model has", here)
        return config.find_basis(origin)
    # without a record in the configuration it was made on this base model, or on one whose weights have none (4-bit)
    basis = config.make_basis(beside, base=config.base_record or adapter.base_record)
    if config.base_record is None and basis.base is not None and basis.id != core.basis_id:
        basis = config.make_basis(beside, base=None)
    require_fit(origin, beside, adapter, _way_out(beside, adapter))
    base = config.base_model_name_or_path or "base model"
    what = f"P and Q beside it, with this model's scales and {base}, make"
    require_same_id(origin, core.basis_id, what, basis.id)
    return basis


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


def _way_out(layers: Mapping[str, LayerBasis], adapter: LoadedAdapter) -> str:
    """What to do with an adapter of other layers or shapes."""
    if any("_orig_mod" in name for name in layers):
        return "It was saved from a compiled model. Call torch.compile on the model with its adapter, as there."
    shapes, ours = {name: (len(one.P), len(one.Q)) for name, one in layers.items()}, adapter.layers
    fits = all(ours[name].shape == shapes[name] for name in shapes.keys() & ours.keys())
    if fits and shapes.keys() == ours.keys():
        return "Make the adapter with the rank and scale of the saved one, as its adapter_config.json has them."
    base = adapter.config.base_model_name_or_path
    same_base = "If this is its base model, take target_modules from its adapter_config.json. " if fits else ""
    named = f" {one_line(base, 200)}" if base else ""
    return f"{same_base}Load the base model{named} in the class that it was trained in (for a command, save it so)."
