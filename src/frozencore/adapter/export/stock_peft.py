"""Whether stock PEFT loads a LoRA onto a base model as it is: tried on a copy without weights.

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
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from frozencore.adapter.core import BASE
from frozencore.text import one_line


def targets_for_peft(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[dict[str, Any], str | None]:
    """Change the targets of a LoRA's configuration, if needed, so that PEFT loads its layers onto a model.

    Layers whose names PEFT takes for fused experts' are named as parameters, which it does not rewrite.

    Args:
        model: The base model as :func:`meta_copy` gives it; stays unchanged.

    Returns:
        The configuration, and why PEFT would load something else; None if it loads the LoRA right.
    """
    layers = {_layer(key) for key in tensors}
    lost, reason = misloaded_layers(config, tensors, model)
    if reason is None or not lost:
        return dict(config), reason
    named = {
        **config,
        "target_modules": sorted(layers - lost),
        "target_parameters": sorted(f"{n}.weight" for n in lost),
    }
    _, still = misloaded_layers(named, tensors, model)
    return (dict(config), reason) if still else (named, None)


def misloaded_layers(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> tuple[set[str], str | None]:
    """Load a LoRA onto a copy of a model without weights as PEFT does.

    Returns:
        The layers whose factors differ after loading, and the reason; the reason is None if PEFT loads the LoRA right.
    """
    given = {key: copy.deepcopy(value) for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
    lora = LoraConfig(**{**given, "peft_type": "LORA"})  # PEFT changes its values
    layers = {_layer(key) for key in tensors}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            loaded = get_peft_model(copy.deepcopy(model), lora, low_cpu_mem_usage=True)
            result = set_peft_model_state_dict(loaded, dict(tensors), low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        return set(), f"PEFT refuses it: {one_line(error, 300)}"
    base = loaded.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    unfilled = sorted(key for key in result.missing_keys if "lora_" in key)
    lost = {name for name in layers if name not in adapted or not _has_factors(adapted[name], name, tensors)}
    unused = sorted(key for key in result.unexpected_keys if "lora_" in key)
    if unfilled:
        return lost, f"PEFT adds untrained factors for {_layer(unfilled[0])!r} ({len(unfilled)} in all)"
    if unused:
        return lost, f"PEFT finds no place for {_layer(unused[0])!r} ({len(unused)} in all)"
    return lost, None


def _layer(key: str) -> str:
    return key.removeprefix(BASE).partition(".lora_")[0]


def _has_factors(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a loaded layer has the factors that the file has under its name."""
    for side in ("lora_A", "lora_B"):
        factors = getattr(layer, side)
        given, loaded = tensors.get(f"{BASE}{name}.{side}.weight"), factors["default"].weight if len(factors) else None
        if (
            given is None
            or loaded is None
            or loaded.is_meta
            or loaded.shape != given.shape
            or not torch.equal(loaded, given)
        ):
            return False
    return True
