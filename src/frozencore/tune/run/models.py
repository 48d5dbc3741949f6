"""The base model of a run: its loading, its adapted layers, and its size."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from frozencore.adapter.layer import layer_shape
from frozencore.adapter.named_layers import attention_projections, linear_names
from frozencore.device import place_of
from frozencore.errors import ConfigError, ModelError
from frozencore.files.gguf_model import read_tokenizer, read_weights, why_unreadable
from frozencore.files.hub import safe_loading
from frozencore.quiet import quiet_loading
from frozencore.ranks import num_ranks
from frozencore.tune.config import MethodConfig, RunConfig
from frozencore.tune.methods import Targets
from frozencore.tune.methods.method import targeted_layers
from frozencore.tune.run.refuse_early import model_location
from frozencore.words import num_of

_WAY_OUT = "Give a folder that save_pretrained wrote, a GGUF file or a hub id."


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> tuple[PreTrainedModel, Any]:
    """Load a causal language model in evaluation mode and its tokenizer.

    Args:
        name: Hub id, local folder, GGUF file, ``pocket`` or ``smollm2``. Local files are read without the network.
        dtype: ``auto`` is the dtype that the model was saved in; float32 for quantised GGUF files.
        device: ``auto`` is the first GPU, or the CPU; of several processes, each one's own.

    Raises:
        ModelError: There is no such model, it cannot be reached or read, or it is not a causal language model.
        ConfigError: There is no such device, or several processes would share one GPU.
    """
    if num_ranks() > 1 and ":" in device:
        raise ConfigError(
            f"Each of several processes has a GPU of its own, but --device {device} came for {num_ranks()}. Use cuda."
        )
    place = place_of(device)
    refusal = "cannot be read as a causal language model with its tokenizer"
    with quiet_loading():
        tokenizer, model = _loaded(name, lambda loading: (_tokenizer(loading), _weights(loading, dtype)), refusal)
    return model.to(place).eval(), tokenizer


def load_config(name: str) -> PretrainedConfig:
    """Load only the configuration of a model.

    Raises:
        ModelError: As in :func:`load_model`.
    """
    return _loaded(name, lambda loading: AutoConfig.from_pretrained(**loading), "has no configuration", way_out="")


def load_tokenizer(name: str) -> Any:
    """Load only the tokenizer of a model.

    Raises:
        ModelError: As in :func:`load_model`.
    """
    return _loaded(name, _tokenizer, "cannot be read as a tokenizer")


def _loaded(name: str, load: Callable[[dict[str, Any]], Any], refusal: str, way_out: str = f" {_WAY_OUT}") -> Any:
    """Find a model and load a part of it; any error becomes one line."""
    name = model_location(name)
    loading = safe_loading(name)
    try:
        return load(loading)
    except Exception as error:  # transformers raises many kinds for a folder that is no model, GGUF files any error
        raise ModelError(f"--model {name} {refusal}: {why_unreadable(loading, error)}{way_out}") from error


def _weights(loading: dict[str, Any], dtype: str) -> PreTrainedModel:
    if "gguf_file" in loading:
        return read_weights(AutoModelForCausalLM, dtype, loading)
    beside = {"local_files_only": loading["local_files_only"]}  # transformers searches for an adapter there
    kind = saved_class(AutoConfig.from_pretrained(**loading)) or AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(dtype=dtype, adapter_kwargs=beside, **loading)
    return model


def saved_class(config: PretrainedConfig) -> Any:
    """The saved class of a language model with parts for images or sound; None for other models.

    For some of them ``AutoModelForCausalLM`` loads the language model alone, whose layers have other names than in the
    class that exports and serving engines load.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    is_whole = type(config) in AutoModelForCausalLM._model_mapping and config.get_text_config() is not config
    return named if is_whole and getattr(named, "config_class", None) is type(config) else None


def without_weights(config: PretrainedConfig) -> nn.Module:
    """A model on the meta device, in the class in which :func:`load_model` loads it."""
    kind = saved_class(config)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    return model


def _tokenizer(loading: dict[str, Any]) -> Any:
    tokenizer = read_tokenizer(loading)
    ids = tokenizer("A word and 1", add_special_tokens=False)["input_ids"]
    if set(ids) <= set(tokenizer.all_special_ids):  # the result of a folder without tokenizer.json
        raise ValueError("its tokenizer knows no words, as tokenizer.json or its like is missing.")
    return tokenizer


_BLOCK = re.compile(r"\.(\d+)\.")


def resolve_targets(config: MethodConfig, model: PreTrainedModel) -> Targets:
    """The layers to adapt: the configured ones, or the method's default, mostly the attention projections.

    Raises:
        ConfigError: A name matches no layer, the architecture is unknown and no names were given, or the model has
            fewer blocks than requested.
    """
    targets = config.targets or config.entry.default_targets(model) or tuple(attention_projections(model))
    if targets != "all-linear":
        _require_each(model, targets)
    return targets if config.layers is None else _in_last_blocks(model, targets, config.layers)


def _in_last_blocks(model: PreTrainedModel, targets: Targets, num_blocks: int) -> tuple[str, ...]:
    """The full names of the layers in the last blocks; the first number in a layer's name is its block."""
    block_of = {name: int(found[1]) for name in targeted_layers(model, targets) if (found := _BLOCK.search(name))}
    there = 1 + max(block_of.values(), default=-1)
    if num_blocks > there:
        raise ConfigError(f"--layers {num_blocks} is more than the {num_of(there, 'block')} of this model.")
    return tuple(name for name, block in block_of.items() if block >= there - num_blocks)


def attention_shapes(model: PreTrainedModel) -> tuple[tuple[int, int], ...]:
    """(m, n) of every attention projection; empty where none is found."""
    try:
        names = targeted_layers(model, tuple(attention_projections(model)))
    except ConfigError:
        return ()
    return tuple(layer_shape(model.get_submodule(name)) for name in names)


def _require_each(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse a name that matches no layer; otherwise a typo among several names would not be noticed."""
    present = {name for name, _ in model.named_modules()}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in present):
            raise ConfigError(
                f"--targets {target!r} matches no layer of this model. Its linear layers are called "
                f"{', '.join(linear_names(model))}; or use all-linear."
            )


TOKENS_A_ROW = 128  # if the rows cannot be read


@dataclass(frozen=True)
class ModelSize:
    """The number of a model's values, and the shapes of its attention projections."""

    num_parameters: int
    shapes: tuple[tuple[int, int], ...]


def size_of(config: PretrainedConfig) -> ModelSize:
    """The size of a model with this configuration."""
    model = without_weights(config)
    return ModelSize(sum(p.numel() for p in model.parameters()), attention_shapes(model))


def memory_bytes(config: RunConfig, size: ModelSize) -> int:
    """Estimate the bytes of weights, moments and activations of a run."""
    weight_bytes = 4 if config.model.dtype == "float32" else 2
    at_once = config.training.rows_a_step if config.training.batch_size == "auto" else config.training.batch_size
    activations = 34 * TOKENS_A_ROW * at_once * int(size.num_parameters**0.5) * weight_bytes
    return size.num_parameters * weight_bytes + moment_bytes(config, size) + activations


def moment_bytes(config: RunConfig, size: ModelSize) -> int:
    """Bytes of the moments for a run's bases."""
    needs = config.method.moments_needed
    values = 0
    for m, n in size.shapes:
        values += m * n * ("cross" in needs) + n * n * ("input_outer" in needs) + m * m * ("error_outer" in needs)
    return 4 * values
