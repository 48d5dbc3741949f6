"""A base model with an adapter's update added to its weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from frozencore.adapter.core import BASE
from frozencore.adapter.export.base_model import base_name, load_base_model, save_tokenizer
from frozencore.adapter.folders import SavedAdapter, read_adapter
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.errors import FrozenCoreError, ModelError
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.hub import safe_loading
from frozencore.files.tokenizer import has_tokenizer
from frozencore.maths.quantise import LOST_TO_ROUNDING
from frozencore.text import one_line


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
        base: Folder, GGUF file or hub id of the base model; by default the one that the adapter names, in its revision.
        dtype: The dtype of the merged weights; ``auto`` keeps the base model's. In half precision the sum is rounded,
            and a warning says how much of the update that costs.

    Returns:
        The folder that was written.

    Raises:
        ArtifactError: The adapter is damaged, or ``out`` exists.
        ModelError: The base model cannot be read, is quantised, or the sum is not finite.
        ConfigError: The adapter names no base model and none was given.
    """
    directory, out = Path(directory), Path(out)
    saved = read_adapter(directory)
    revision = None if base else saved.config.revision
    base = base_name(directory, base, saved.config.base_model_name_or_path)
    loading = safe_loading(base, revision)
    with atomic_folder(out, overwrite=overwrite, reads=[directory, saved.config.basis, base]) as aside:
        why_not = "rounding to its grid would lose most of an update"
        base_model = load_base_model(base, dtype, loading, why_not)
        tokenizer = save_tokenizer(directory, aside, loading)
        try:
            if has_tokenizer(directory) and tokenizer is not None:
                _embed_all(base_model, len(tokenizer))
            _require_modules(saved, base_model, base)
            adapted = PeftModel.from_pretrained(base_model, str(directory))
            lost = _lost_to_rounding(adapted)
            merged = adapted.merge_and_unload(safe_merge=True)
        except FrozenCoreError:
            raise
        except Exception as error:  # PEFT raises a dozen kinds for names, shapes and options that fit no layer
            reason = one_line(error, 200)
            raise ModelError(
                f"The adapter in {directory} cannot be merged into the base model {base}: {reason} "
                "Name the base model that it was trained on with base= (--base)."
            ) from error
        merged.save_pretrained(aside)
    if lost >= LOST_TO_ROUNDING:
        warnings.warn(
            f"Of the adapter's update, {lost:.2%} (Frobenius norm) is lost to rounding in {merged.dtype}. Merge in "
            "float32 (--dtype float32), or export a LoRA.",
            stacklevel=2,
        )
    return out


def _require_modules(saved: SavedAdapter, model: nn.Module, base: str | Path) -> None:
    """Refuse a base model without the modules that an adapter trained as a whole: PEFT would leave them out."""
    there = {name for name, _ in model.named_modules()}
    for name in saved.config.modules_to_save or ():
        paths = (key.removeprefix(BASE).split(".") for key in saved.modules)
        whole = {".".join(path[: path.index(name) + 1]) for path in paths if name in path}
        if odd := sorted(whole - there):
            raise ModelError(
                f"The adapter in {saved.folder} has trained {odd[0]!r} as a whole, which {base} "
                f"({type(model).__name__}) lacks. Save the base model in the class that the adapter was trained on, "
                "and name that folder with base= (--base)."
            )


def _embed_all(model: Any, num_tokens: int) -> None:
    """Add the embeddings that a model lacks for the tokens of an adapter, as PEFT's AutoPeftModel does."""
    if num_tokens > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(num_tokens)


@torch.no_grad()
def _lost_to_rounding(model: nn.Module) -> float:
    """The relative error in Frobenius norm of an update that is added to weights in their dtype."""
    lost = whole = 0.0
    for layer in frozen_core_layers(model, "default").values():
        weight, update = layer.get_base_weight(), layer.get_delta_weight("default")
        merged = (weight + update).to(weight.dtype)
        lost += float((merged.float() - weight.float() - update).square().sum())
        whole += float(update.square().sum())
    return (lost / whole) ** 0.5 if whole else 0.0
