"""A model and its tokenizer from a hub id or a local folder, and what is said when there is none."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from frozencore.device import find_device
from frozencore.errors import ModelError
from frozencore.hub import safe_loading
from frozencore.lab.pocket import POCKET_MODEL, pocket_model_path
from frozencore.one_line import one_line
from frozencore.quiet import quiet_loading


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> tuple[PreTrainedModel, Any]:
    """A causal language model in evaluation mode and its tokenizer.

    Args:
        name: Hub id, path of a local folder, or ``pocket``. A folder is read without any network access.
        dtype: ``auto`` is the dtype that the model was saved in.
        device: ``auto`` is the first GPU, or the CPU.

    Raises:
        ModelError: There is no such model, it cannot be reached or read, or it is not a causal language model.
        ConfigError: There is no such device.
    """
    place = _device(device)
    name = model_location(name)
    safely = safe_loading(name)
    try:
        with quiet_loading():
            tokenizer = _tokenizer(name, safely)
            beside = {"local_files_only": safely["local_files_only"]}  # it looks for an adapter there
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, adapter_kwargs=beside, **safely)
    except Exception as error:  # transformers raises a dozen kinds for a folder that is not a model
        reason = one_line(error, 200)
        raise ModelError(
            f"--model {name} cannot be read as a causal language model with its tokenizer: {reason} "
            "Give a folder that save_pretrained wrote, or a hub id."
        ) from error
    return model.to(place).eval(), tokenizer


def load_config(name: str) -> PretrainedConfig:
    """The configuration of a model, alone.

    Raises:
        ModelError: As for :func:`load_model`.
    """
    name = model_location(name)
    safely = safe_loading(name)
    try:
        return AutoConfig.from_pretrained(name, **safely)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {name} has no configuration: {one_line(error, 200)}") from error


def model_location(name: str) -> str:
    """What transformers is to be asked for."""
    return str(pocket_model_path()) if name == POCKET_MODEL else name


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, alone.

    Raises:
        ModelError: As for :func:`load_model`.
    """
    name = model_location(name)
    safely = safe_loading(name)
    try:
        return _tokenizer(name, safely)
    except (OSError, ValueError) as error:
        reason = one_line(error, 200)
        raise ModelError(
            f"--model {name} cannot be read as a tokenizer: {reason} "
            "Give a folder that save_pretrained wrote, or a hub id."
        ) from error


def _tokenizer(name: str, safely: dict[str, bool]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(name, **safely)
    ids = tokenizer("A word and 1", add_special_tokens=False)["input_ids"]
    if set(ids) <= set(tokenizer.all_special_ids):  # what transformers makes of a folder without tokenizer.json
        raise ValueError("its tokenizer knows no words, as tokenizer.json or its like is missing.")
    return tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return find_device(name)
