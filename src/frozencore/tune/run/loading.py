"""A model and its tokenizer from a hub id, a local folder or a GGUF file, and what is said when there is none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from frozencore.device import find_device
from frozencore.errors import ModelError
from frozencore.files.gguf_model import read_tokenizer, read_weights, why_unreadable
from frozencore.files.hub import safe_loading
from frozencore.quiet import quiet_loading
from frozencore.tune.run.model_names import model_location

_WAY_OUT = "Give a folder that save_pretrained wrote, a GGUF file or a hub id."


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> tuple[PreTrainedModel, Any]:
    """A causal language model in evaluation mode and its tokenizer.

    Args:
        name: Hub id, local folder, GGUF file, ``pocket`` or ``smollm2``. What is local is read without the network.
        dtype: ``auto`` is the dtype that the model was saved in; float32 for quantised GGUF files.
        device: ``auto`` is the first GPU, or the CPU.

    Raises:
        ModelError: There is no such model, it cannot be reached or read, or it is not a causal language model.
        ConfigError: There is no such device.
    """
    place = _device(device)
    name = model_location(name)
    loading = safe_loading(name)
    try:
        with quiet_loading():
            tokenizer = _tokenizer(loading)
            model = _weights(loading, dtype)
    except Exception as error:  # transformers raises a dozen kinds for a folder that is not a model
        raise ModelError(
            f"--model {name} cannot be read as a causal language model with its tokenizer: "
            f"{why_unreadable(loading, error)} {_WAY_OUT}"
        ) from error
    return model.to(place).eval(), tokenizer


def load_config(name: str) -> PretrainedConfig:
    """The configuration of a model, alone.

    Raises:
        ModelError: As for :func:`load_model`.
    """
    name = model_location(name)
    loading = safe_loading(name)
    try:
        return AutoConfig.from_pretrained(**loading)
    except Exception as error:  # of a GGUF file, whatever its damage leads to
        raise ModelError(f"--model {name} has no configuration: {why_unreadable(loading, error)}") from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, alone.

    Raises:
        ModelError: As for :func:`load_model`.
    """
    name = model_location(name)
    loading = safe_loading(name)
    try:
        return _tokenizer(loading)
    except Exception as error:
        raise ModelError(
            f"--model {name} cannot be read as a tokenizer: {why_unreadable(loading, error)} {_WAY_OUT}"
        ) from error


def _weights(loading: dict[str, Any], dtype: str) -> PreTrainedModel:
    if "gguf_file" in loading:
        return read_weights(AutoModelForCausalLM, dtype, loading)
    beside = {"local_files_only": loading["local_files_only"]}  # it looks for an adapter there
    return AutoModelForCausalLM.from_pretrained(dtype=dtype, adapter_kwargs=beside, **loading)


def _tokenizer(loading: dict[str, Any]) -> Any:
    tokenizer = read_tokenizer(loading)
    ids = tokenizer("A word and 1", add_special_tokens=False)["input_ids"]
    if set(ids) <= set(tokenizer.all_special_ids):  # what transformers makes of a folder without tokenizer.json
        raise ValueError("its tokenizer knows no words, as tokenizer.json or its like is missing.")
    return tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return find_device(name)
