"""Which layers a LoRA directory must name: the adapted ones, and those that engines pack together with them.

SGLang stacks q, k, v (and gate, up) of a layer into one matrix and looks each of them up by name; PEFT builds every
layer that ``target_modules`` names. A directory that holds exactly those layers, zero where nothing was adapted,
satisfies both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.layer import is_linear, layer_shape
from frozencore.errors import ArtifactError, ModelError
from frozencore.files.gguf_model import model_class, why_unreadable
from frozencore.files.hub import safe_loading

PACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_SAME_SHAPE = {"k_proj": "v_proj", "v_proj": "k_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}
_MAYBE_CONV1D = {"c_attn", "c_proj", "c_fc", "q_attn"}


@dataclass(frozen=True)
class BaseLayers:
    """The linear layers of a base model: (m, n) by name, and which are ``Conv1D``; and the model's configuration."""

    shapes: Mapping[str, tuple[int, int]]
    conv1d: frozenset[str]
    config: Any


def layers_of(base: nn.Module | str | Path) -> BaseLayers:
    """The linear layers of a model, or of the architecture in a folder or GGUF file, whose weights are not read."""
    model = base if isinstance(base, nn.Module) else _architecture(base)
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    plain = {
        name: module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        for name, module in model.named_modules()
        if not name.startswith(inside)
    }
    linear = {name: module for name, module in plain.items() if is_linear(module)}
    return BaseLayers(
        shapes={name: layer_shape(module) for name, module in linear.items()},
        conv1d=frozenset(name for name, module in linear.items() if isinstance(module, Conv1D)),
        config=getattr(model, "config", None),
    )


def layers_to_name(adapted: Mapping[str, tuple[int, int]], base: BaseLayers | None) -> dict[str, tuple[int, int]]:
    """Shapes of all layers that the directory must hold, the adapted ones first.

    Raises:
        ArtifactError: The base model is not the adapter's, or is needed and was not given.
    """
    if base is None:
        return {**adapted, **_inferred(adapted)}
    for name, shape in adapted.items():
        if base.shapes.get(name) != shape:
            raise ArtifactError(
                f"The adapter is of another base model: its layer {name!r} is {shape[0]} x {shape[1]}, the base has "
                f"{base.shapes.get(name, 'none')}. Name the model it was trained on."
            )
    kinds = {_kind(name) for layer in adapted for name in (layer, *_siblings(layer))}
    return {**adapted, **{name: shape for name, shape in base.shapes.items() if _kind(name) in kinds}}


def target_modules(named: Iterable[str], base: BaseLayers | None) -> list[str]:
    """Names for ``target_modules`` that match exactly the layers of the directory: last parts where they suffice."""
    layers = set(named)
    last_parts = {_last(name) for name in layers}
    if base is not None and {name for name in base.shapes if _last(name) in last_parts} != layers:
        return sorted(layers)
    return sorted(last_parts)


def _inferred(adapted: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Packed layers that are missing: k and v have one shape, gate and up have one shape."""
    unclear = [name for name in adapted if _last(name) in _MAYBE_CONV1D]
    found: dict[str, tuple[int, int]] = {}
    for layer in adapted:
        for name in set(_siblings(layer)) - adapted.keys():
            twin = name.removesuffix(_last(name)) + _SAME_SHAPE.get(_last(name), "")
            if twin in adapted:
                found[name] = adapted[twin]
            else:
                unclear.append(name)
    if unclear:
        raise ArtifactError(
            f"The shape or kind of layer {unclear[0]!r} is in the base model, not in the adapter: "
            "give base=, the model or its folder (--base on the command line)."
        )
    return found


def _siblings(layer: str) -> list[str]:
    last = _last(layer)
    return [layer.removesuffix(last) + name for pack in PACKS if last in pack for name in pack if name != last]


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


def _kind(layer: str) -> str:
    """The name without the numbers of layers, so that a vision tower's q_proj is not the text model's."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _architecture(base: str | Path) -> nn.Module:
    loading = safe_loading(str(base))
    try:
        config = AutoConfig.from_pretrained(**loading)
        with torch.device("meta"):
            return model_class(config)(config)
    except Exception as error:  # of a GGUF file, whatever its damage leads to
        reason = why_unreadable(loading, error)
        raise ModelError(f"The base model {base} cannot be read: {reason} Give its folder, file or hub id.") from error
