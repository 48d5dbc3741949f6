"""How stock PEFT loads a LoRA directory onto its base model, tried on a copy without weights.

PEFT rewrites names of layers for models whose experts transformers has fused since version 5: it takes every
``gate_proj``, ``up_proj`` and ``down_proj`` for an expert's, also those of shared experts and dense layers. It refuses
some layers (``out_proj`` of Mamba), and its short names match modules of any kind.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.layer import is_linear, layer_shape
from frozencore.words import one_line

LAYER = "base_model.model."


def without_weights(model: nn.Module) -> nn.Module:
    """Copy the modules of a base model onto the meta device, without its adapters and quantisation."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(X): nn.Parameter(X.detach().to("meta"), requires_grad=False) for X in tensors}
    copied = copy.deepcopy(model, memo)
    for (name, module), own in zip(list(copied.named_modules()), model.modules(), strict=True):
        base, of_model = (one.get_base_layer() if isinstance(one, BaseTunerLayer) else one for one in (module, own))
        is_plain = isinstance(base, nn.Linear | Conv1D) and type(of_model.weight) is nn.Parameter  # 4-bit: a subclass
        if is_linear(base) and not is_plain:
            m, n = layer_shape(base)
            base = nn.Linear(n, m, device="meta")
        if base is not module:
            copied.set_submodule(name, base)
    for attribute in ("peft_config", "_hf_peft_config_loaded"):  # of transformers' own integration
        vars(copied).pop(attribute, None)
    return copied


def targets_for_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Any], str | None]:
    """Change the targets of a LoRA's configuration, if needed, so that PEFT loads its layers onto a model.

    Layers whose names PEFT takes for fused experts' are named as parameters, which it does not rewrite.

    Args:
        model: The base model as :func:`without_weights` gives it; stays unchanged.

    Returns:
        The configuration, and why PEFT would load something else; None if it loads the LoRA right.
    """
    layers = {_layer(key) for key in tensors}
    lost, reason = lost_in_peft(config, tensors, model)
    if reason is None or not lost:
        return dict(config), reason
    named = {
        **config,
        "target_modules": sorted(layers - lost),
        "target_parameters": sorted(f"{n}.weight" for n in lost),
    }
    _, still = lost_in_peft(named, tensors, model)
    return (dict(config), reason) if still else (named, None)


def lost_in_peft(
    config: Mapping[str, Any] | PeftConfig, tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[set[str], str | None]:
    """Load a LoRA onto a copy of a model without weights as PEFT does.

    Returns:
        The layers of the LoRA that have other factors after loading, and the reason; None if every layer has its own.
    """
    if not isinstance(config, PeftConfig):
        given = {key: copy.deepcopy(value) for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
        config = LoraConfig(**{**given, "peft_type": "LORA"})  # PEFT changes its values
    layers = {_layer(key) for key in tensors}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            loaded = get_peft_model(copy.deepcopy(model), config, low_cpu_mem_usage=True)
            result = set_peft_model_state_dict(loaded, dict(tensors), low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        return set(), f"PEFT refuses it: {one_line(error, 300)}"
    base = loaded.get_base_model()
    found = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    unfilled = sorted(key for key in result.missing_keys if "lora_" in key)
    lost = {name for name in layers if name not in found or not _holds(found[name], name, tensors)}
    unused = sorted(key for key in result.unexpected_keys if "lora_" in key)
    if unfilled:
        return lost, f"PEFT adds untrained factors for {_layer(unfilled[0])!r} ({len(unfilled)} in all)"
    if unused:
        return lost, f"PEFT finds no place for {_layer(unused[0])!r} ({len(unused)} in all)"
    return lost, None


def _layer(key: str) -> str:
    return key.removeprefix(LAYER).partition(".lora_")[0]


def _holds(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a loaded layer has the factors that the file has under its name."""
    for side in ("lora_A", "lora_B"):
        factors = getattr(layer, side)
        given, held = tensors.get(f"{LAYER}{name}.{side}.weight"), factors["default"].weight if len(factors) else None
        if given is None or held is None or held.is_meta or held.shape != given.shape or not torch.equal(held, given):
            return False
    return True
