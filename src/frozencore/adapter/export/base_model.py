"""The base model of an export: its layers by name, its weights, its tokenizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.card import CLASS_OF_TASK
from frozencore.adapter.layer import is_linear, layer_shape
from frozencore.adapter.named_layers import is_end_of
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.files.gguf_file import full_name
from frozencore.files.hub import begins_as_path, safe_loading, why_unreadable
from frozencore.files.tokenizer import read_tokenizer, with_own_tokenizer
from frozencore.unwrapped_model import base_of


@dataclass(frozen=True)
class BaseLayers:
    """The linear layers of a base model, (m, n) by name, which are ``Conv1D``, and the model without weights."""

    shapes: Mapping[str, tuple[int, int]]
    conv1d: frozenset[str]
    model: nn.Module

    def require_layer(self, name: str, shape: tuple[int, int]) -> None:
        """Refuse a layer of an adapter that this base model does not have in that shape."""
        if self.shapes.get(name) == shape:
            return
        if other := in_other_class(name, shape, self.shapes):
            raise ArtifactError(
                f"The adapter was trained in another class of the base model, where the layer {other} is {name!r}. "
                "Save the base model in that class, such as AutoModelForCausalLM or AutoModel, and name that folder."
            )
        raise ArtifactError(
            f"The adapter is of another base model: its layer {name!r} is {shape[0]} x {shape[1]}, the base has "
            f"{self.shapes.get(name, 'none')}. Name the model it was trained on."
        )


def in_other_class(layer: str, shape: tuple[int, int], shapes: Mapping[str, tuple[int, int]]) -> str | None:
    """The name that a layer of a part of a model probably has here: its own after another first part."""
    rest = layer.partition(".")[2]
    there = (name for name in shapes if shapes[name] == shape and is_end_of(rest, name))
    return next(there, None) if layer not in shapes else None


def layers_of(base: nn.Module | str | Path, revision: str | None = None) -> BaseLayers:
    """The linear layers of a model, or of the architecture in a folder or GGUF file; its weights are not read."""
    whole: Any = base
    if not isinstance(base, nn.Module):
        loading = safe_loading(str(base), revision)
        with _reading(base, loading), torch.device("meta"):
            config, saved = _saved_class(loading)
            whole = saved(config)
    model = meta_copy(base_of(whole))
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    return BaseLayers(
        shapes={name: layer_shape(module) for name, module in linear.items()},
        conv1d=frozenset(name for name, module in linear.items() if isinstance(module, Conv1D)),
        model=model,
    )


def layers_by_class(base: str, revision: str | None) -> Iterator[Mapping[str, tuple[int, int]]]:
    """The shapes of a model's linear layers in the class in which it was saved, then in those in which tasks load it.

    Raises:
        ModelError: Its configuration cannot be read.
    """
    loading = safe_loading(base, revision)
    with _reading(base, loading):
        config, saved = _saved_class(loading)
    for_tasks = (partial(auto.from_config, trust_remote_code=False) for auto in CLASS_OF_TASK.values())
    for make in (saved, *for_tasks):
        try:
            with torch.device("meta"):
                model = make(config)
        except Exception:  # transformers raises many kinds; no model has a class for every task
            continue
        yield layers_of(model).shapes


def base_name(origin: Path, base: str | Path | None, named: str | None) -> str:
    """The requested base model, else the one that the adapter names."""
    if base:
        return str(base)
    way_out = "give base=, its folder, file or hub id (--base)."
    if not named:
        raise ConfigError(f"{origin} names no base model: {way_out}")
    if begins_as_path(named) and not Path(named).expanduser().exists():
        raise ConfigError(f"{origin} names the base model {named:.200}, which is gone: {way_out}")
    return named


def load_base_model(base: str, dtype: str, loading: dict[str, Any], not_quantised: str) -> Any:
    """Load the model in a folder or GGUF file or under a hub id, in the class that it was saved as.

    Args:
        dtype: ``auto`` takes the dtype of the file.
        loading: The options of :func:`frozencore.files.hub.safe_loading`.
        not_quantised: The reason why a quantised model is refused.
    """
    with _reading(base, loading):
        config, saved = _saved_class(loading)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"The base model {base} is quantised, and {not_quantised}. "
            "Name the unquantised model with base= (--base), or export a LoRA."
        )
    with _reading(base, loading):
        model = saved.from_pretrained(dtype=dtype, **loading)
    model.name_or_path = model.config.name_or_path = full_name(base)
    vars(model.config).pop("auto_map", None)  # it names code that is neither run nor copied
    return model


def save_tokenizer(directory: Path, out: Path, loading: dict[str, Any]) -> Any:
    """Write the base model's processor, if it has one, and the tokenizer of the adapter, else of the base model.

    Returns:
        The tokenizer; None, with a warning, if it cannot be read.
    """
    with suppress(Exception):  # transformers raises many kinds
        processor = AutoProcessor.from_pretrained(**loading)
        if not isinstance(processor, PreTrainedTokenizerBase):  # which most models have instead
            processor.save_pretrained(out)
    loading = with_own_tokenizer(directory, loading)
    try:
        tokenizer = read_tokenizer(loading)
    except Exception as error:  # transformers raises many kinds
        place, reason = loading["pretrained_model_name_or_path"], why_unreadable(loading, error)
        warnings.warn(f"The export has no tokenizer, because that of {place} cannot be read: {reason}", stacklevel=2)
        return None
    tokenizer.save_pretrained(out)
    return tokenizer


def _saved_class(loading: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration of a model, and transformers' class in which it was saved."""
    config = AutoConfig.from_pretrained(**loading)
    name = next(iter(config.architectures or ()), None)
    if name is None or not hasattr(transformers, name):
        raise ModelError(f"its config.json names the class {name}, which transformers does not have.")
    return config, getattr(transformers, name)


@contextmanager
def _reading(base: object, loading: dict[str, Any]) -> Iterator[None]:
    """Name the base model in the error of a model that cannot be read."""
    try:
        yield
    except Exception as error:  # transformers raises many kinds
        reason = why_unreadable(loading, error)
        raise ModelError(f"The base model {base} cannot be read: {reason} Give its folder, file or hub id.") from error


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a base model onto the meta device, without its adapters and quantisation."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(X): nn.Parameter(X.detach().to("meta"), requires_grad=False) for X in tensors}
    copied = copy.deepcopy(model, memo)
    for (name, module), original in zip(list(copied.named_modules()), model.modules(), strict=True):
        base, of_model = (
            one.get_base_layer() if isinstance(one, BaseTunerLayer) else one for one in (module, original)
        )
        is_plain = isinstance(base, nn.Linear | Conv1D) and type(of_model.weight) is nn.Parameter  # 4-bit: a subclass
        if is_linear(base) and not is_plain:
            m, n = layer_shape(base)
            base = nn.Linear(n, m, device="meta")
        if base is not module:
            copied.set_submodule(name, base)
    for attribute in ("peft_config", "_hf_peft_config_loaded"):  # of transformers' integration of PEFT
        vars(copied).pop(attribute, None)
    return copied
