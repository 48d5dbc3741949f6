"""The base model of an export: its layers by name, its weights, its tokenizer; and an adapter merged into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from frozencore.adapter.export.in_peft import without_weights
from frozencore.adapter.layer import is_linear, layer_shape
from frozencore.adapter.saved.folder import read_adapter
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError, ModelError
from frozencore.files.gguf_model import model_class, read_tokenizer, read_weights, why_unreadable
from frozencore.files.hub import safe_loading
from frozencore.files.whole_file import whole_folder
from frozencore.words import one_line

_TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True)
class BaseLayers:
    """The linear layers of a base model, (m, n) by name, which are ``Conv1D``, and the model without weights."""

    shapes: Mapping[str, tuple[int, int]]
    conv1d: frozenset[str]
    model: nn.Module

    def require_layer(self, name: str, shape: tuple[int, int]) -> None:
        """Refuse a layer of an adapter that this base model does not have in that shape."""
        if self.shapes.get(name) != shape:
            raise ArtifactError(
                f"The adapter is of another base model: its layer {name!r} is {shape[0]} x {shape[1]}, the base has "
                f"{self.shapes.get(name, 'none')}. Name the model it was trained on."
            )


def layers_of(base: nn.Module | str | Path) -> BaseLayers:
    """The linear layers of a model, or of the architecture in a folder or GGUF file; its weights are not read."""
    model = base if isinstance(base, nn.Module) else _architecture(base)
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    model = without_weights(model)
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    return BaseLayers(
        shapes={name: layer_shape(module) for name, module in linear.items()},
        conv1d=frozenset(name for name, module in linear.items() if isinstance(module, Conv1D)),
        model=model,
    )


def base_name(origin: Path, *names: str | Path | None) -> str:
    """The first name that is not empty: the requested base model, else the one that the adapter names."""
    name = next((str(name) for name in names if name), "")
    if not name:
        raise ConfigError(f"{origin} names no base model: give base=, its folder, file or hub id (--base).")
    return name


def load_base_model(base: str, dtype: str, loading: dict[str, Any], not_quantised: str) -> Any:
    """Load the model in a folder or GGUF file or under a hub id, in the class that it was saved as.

    Args:
        dtype: ``auto`` takes the dtype of the file.
        loading: The options of :func:`frozencore.files.hub.safe_loading`.
        not_quantised: The reason why a quantised model is refused.
    """
    try:
        config = AutoConfig.from_pretrained(**loading)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"The base model {base} is quantised, and {not_quantised}. "
                "Name the unquantised model with base= (--base), or export a LoRA."
            )
        if "gguf_file" in loading:
            return read_weights(model_class(config), dtype, loading)
        return model_class(config).from_pretrained(dtype=dtype, **loading)
    except ModelError:
        raise
    except Exception as error:  # a damaged GGUF file may raise anything
        raise _unreadable(base, loading, error) from error


def save_tokenizer(directory: Path, out: Path, loading: dict[str, Any]) -> None:
    """Write the tokenizer of the adapter, else of the base model, if there is one."""
    if (directory / _TOKENIZER).is_file():
        loading = {**loading, "pretrained_model_name_or_path": str(directory), "local_files_only": True}
        loading.pop("gguf_file", None)
    place = Path(loading["pretrained_model_name_or_path"])
    if "gguf_file" in loading or not place.is_dir() or (place / _TOKENIZER).is_file():
        read_tokenizer(loading).save_pretrained(out)


def _architecture(base: str | Path) -> nn.Module:
    loading = safe_loading(str(base))
    try:
        config = AutoConfig.from_pretrained(**loading)
        with torch.device("meta"):
            return model_class(config)(config)
    except Exception as error:  # a damaged GGUF file may raise anything
        raise _unreadable(base, loading, error) from error


def _unreadable(base: object, loading: dict[str, Any], error: Exception) -> ModelError:
    reason = why_unreadable(loading, error)
    return ModelError(f"The base model {base} cannot be read: {reason} Give its folder, file or hub id.")


_NOT_QUANTISED = "rounding to its grid would lose most of an update"


def export_merged(
    directory: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
) -> Path:
    """Write base weights plus update, and the tokenizer of the adapter or of the base if either has one.

    Args:
        directory: A folder that ``save_pretrained`` or ``frozencore tune`` wrote.
        base: Folder, GGUF file or hub id of the base model; by default the one that the adapter names.
        dtype: The dtype of the merged weights; ``auto`` keeps the base model's. In half precision the sum is rounded.

    Returns:
        The folder that was written.

    Raises:
        ArtifactError: The adapter is damaged, or ``out`` exists.
        ModelError: The base model cannot be read, is quantised, or the sum is not finite.
        ConfigError: The adapter names no base model and none was given.
    """
    directory, out = Path(directory), Path(out)
    config, _ = read_adapter(directory)
    base = base_name(directory, base, config.base_model_name_or_path)
    loading = safe_loading(base)
    with whole_folder(out, overwrite=overwrite, reads=directory) as aside:
        try:
            model = PeftModel.from_pretrained(load_base_model(base, dtype, loading, _NOT_QUANTISED), str(directory))
        except FrozenCoreError:
            raise
        except Exception as error:  # PEFT raises a dozen kinds for names, shapes and options that fit no layer
            reason = one_line(error, 200)
            raise ModelError(
                f"The adapter in {directory} does not fit the base model {base}: {reason} "
                "Name the base model that it was trained on with base= (--base)."
            ) from error
        try:
            merged = model.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise ModelError(f"{directory} cannot be merged: {error}. Train it again.") from error
        merged.save_pretrained(aside)
        save_tokenizer(directory, aside, loading)
    return out
