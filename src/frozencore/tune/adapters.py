"""The adapter of each method: which layers it takes, how it is added to a model, and how it is saved.

A new method registers its way onto a model with :func:`add_adapter`, beside its row in
:data:`frozencore.tune.methods.METHODS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.card import begin_model_card
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.core import Core
from frozencore.adapter.folders import read_adapter
from frozencore.adapter.loaded_basis import set_basis
from frozencore.adapter.named_layers import attention_projections
from frozencore.errors import ConfigError
from frozencore.files.atomic_write import atomic_folder
from frozencore.maths.basis import LayerBasis
from frozencore.options import options_of
from frozencore.tune.methods import FrozenCore, FullFineTuning, LoRA, Method, MethodConfig, Targets


def default_targets(method: Method, model: nn.Module) -> Targets:
    """The layers that a method adapts if none are named: the attention projections.

    Full fine-tuning takes every module with parameters; for tied embeddings the input embedding.
    """
    if not isinstance(method, FullFineTuning):
        return tuple(attention_projections(model))
    head = cast(Any, model).get_output_embeddings()
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    return tuple(
        name for name in names if model.get_submodule(name) is not head or not _ties_its_embeddings(model, names)
    )


def targeted_layers(model: nn.Module, targets: Targets) -> list[str]:
    """The full names of the layers, in the model's order; ``all-linear`` excludes the output layer.

    A name or the end of a name selects linear layers; a full name may also select another module with parameters.
    """
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


@singledispatch
def add_adapter(
    method: Method, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None
) -> PeftModel:
    """Add the adapter of a method without calibration; the model's output does not change.

    Args:
        bases: The layers of the basis of a ``weights_only`` method, to save the computation.

    Raises:
        ConfigError: The options contradict one another or do not fit the model.
    """
    raise NotImplementedError(f"add_adapter has no function for {type(method).__name__}")


@add_adapter.register
def _(
    method: FrozenCore, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None
) -> PeftModel:
    if options.basis is not None:
        return get_peft_model(model, FrozenCoreConfig(basis=options.basis, task_type="CAUSAL_LM"))
    known = options_of(FrozenCoreConfig)
    config = FrozenCoreConfig(
        r=options.r,
        target_modules=_as_peft_takes(options),
        constructor=method.constructor,
        seed=options.seed,
        task_type="CAUSAL_LM",
        load_bases=bases is not None,
        constructor_options={name: value for name, value in options.core.items() if name not in known},
        **{name: value for name, value in options.core.items() if name in known},
    )
    adapted = get_peft_model(model, config)
    if bases is not None:
        set_basis(adapted, bases)
    return adapted


@add_adapter.register
def _(
    method: LoRA, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None
) -> PeftModel:
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.r,
        lora_dropout=0.0,
        bias="none",
        target_modules=_as_peft_takes(options),
        init_lora_weights=method.initialisation,
        use_dora=method.use_dora,
        task_type="CAUSAL_LM",
    )
    return _from_peft(method, model, options, config)


@add_adapter.register
def _(
    method: FullFineTuning, model: nn.Module, options: MethodConfig, bases: Mapping[str, LayerBasis] | None = None
) -> PeftModel:
    names = targeted_layers(model, options.target_modules or default_targets(method, model))
    if not names:
        raise _misfit(method, options, "no linear layer is called so")
    for name in names:
        if not all(parameter.is_floating_point() for parameter in model.get_submodule(name).parameters()):
            raise ConfigError(
                f"{method.label} trains the weights themselves, but those of {name} are quantised. Load the model "
                "without quantisation, or train an adapter."
            )
    config = LoraConfig(
        target_modules=DUMMY_TARGET_MODULES,
        modules_to_save=names,
        ensure_weight_tying=_ties_its_embeddings(model, names),
        task_type="CAUSAL_LM",
    )
    adapted = _from_peft(method, model, options, config)
    for module in adapted.modules():
        if isinstance(module, ModulesToSaveWrapper):
            dtype = next(module.original_module.parameters()).dtype
            _train_in_float32(module.modules_to_save["default"], dtype)
    return adapted


def _from_peft(method: Method, model: nn.Module, options: MethodConfig, config: PeftConfig) -> PeftModel:
    """Add an adapter of PEFT, in float32 also on a 16-bit base; the global random state is restored."""
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        try:
            return get_peft_model(model, config)
        except (ValueError, TypeError) as error:
            raise _misfit(method, options, error) from error


def _misfit(method: Method, options: MethodConfig, reason: object) -> ConfigError:
    return ConfigError(f"The targets {options.target_modules!r} cannot carry {method.label}: {reason}")


def _as_peft_takes(options: MethodConfig) -> str | list[str] | None:
    """The targets in the form of a PEFT configuration."""
    return list(options.target_modules) if isinstance(options.target_modules, tuple) else options.target_modules


def _train_in_float32(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a module's weights float32; its output keeps the model's dtype, also if tied weights are float32 already."""
    if dtype.itemsize >= torch.float32.itemsize:
        return
    module.float()
    module.register_forward_pre_hook(lambda _, given: tuple(x.float() if x.is_floating_point() else x for x in given))
    module.register_forward_hook(lambda _, __, result: result.to(dtype))


def _ties_its_embeddings(model: nn.Module, names: list[str]) -> bool:
    """Return whether the output layer shares the input embeddings' weight, and these are among the modules."""
    inputs, outputs = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
    is_named = any(model.get_submodule(name) is inputs for name in names)
    return is_named and outputs is not None and outputs.weight is inputs.weight


def keep_start(method: Method, model: PeftModel, folder: Path) -> None:
    """Store in a folder the initial state that :func:`save_adapter` needs, if the method changes the base model."""
    if method.changes_base:
        model.save_pretrained(str(folder))


def save_adapter(method: Method, model: PeftModel, folder: Path, start: Path, core: Core | None = None) -> None:
    """Save a trained adapter atomically, for ``PeftModel.from_pretrained`` on the original base model.

    Args:
        start: The folder of :func:`keep_start`.
        core: The model's core, as a file stores it; None for a method without bases.
    """
    if core is None or core.packed is None:
        with atomic_folder(folder, overwrite=True) as aside:
            _write(method, model, aside, start)
        return
    with TemporaryDirectory() as aside:
        whole = Path(aside) / folder.name
        save_adapter(method, model, whole, start)
        read_adapter(whole).write(folder, core, overwrite=True)


def _write(method: Method, model: PeftModel, folder: Path, start: Path) -> None:
    if method.has_bases:
        begin_model_card(folder)
    converted = {"path_initial_model_for_weight_conversion": str(start)} if method.changes_base else {}
    with warnings.catch_warnings():  # PEFT warns to convert although it converts here
        warnings.filterwarnings("ignore", message="PiSSA changes the base weights")
        model.save_pretrained(str(folder), **converted)
