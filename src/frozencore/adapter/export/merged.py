"""A frozen core merged into its base model's weights: a plain model folder."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel

from frozencore.adapter.export.base_model import base_name, load_base_model, save_tokenizer
from frozencore.adapter.saved.folder import read_adapter
from frozencore.errors import FrozenCoreError, ModelError
from frozencore.files.hub import safe_loading
from frozencore.files.whole_file import whole_folder
from frozencore.words import one_line

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
        ArtifactError: The adapter is damaged, or ``out`` is in the way.
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
