"""The base model that an export goes into: loaded without its code and unquantised, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from frozencore.errors import ModelError
from frozencore.files.gguf_model import model_class, read_tokenizer, read_weights, why_unreadable

_TOKENIZER = "tokenizer_config.json"


def load_base_model(base: str, dtype: str, loading: dict[str, Any], not_quantised: str) -> Any:
    """The model in a folder or GGUF file or under a hub id, of the class that it was saved as.

    Args:
        dtype: ``auto`` is that of its file.
        loading: As :func:`frozencore.files.hub.safe_loading` gives it.
        not_quantised: Why a quantised one is refused.

    Raises:
        ModelError: It cannot be read, or is quantised.
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
    except Exception as error:  # of a GGUF file, whatever its damage leads to
        reason = why_unreadable(loading, error)
        raise ModelError(f"The base model {base} cannot be read: {reason} Give its folder, file or hub id.") from error


def save_tokenizer(directory: Path, out: Path, loading: dict[str, Any]) -> None:
    """Write the tokenizer of an adapter, or of the base model, where one of them has one."""
    if (directory / _TOKENIZER).is_file():
        loading = {**loading, "pretrained_model_name_or_path": str(directory), "local_files_only": True}
        loading.pop("gguf_file", None)
    place = Path(loading["pretrained_model_name_or_path"])
    if "gguf_file" in loading or not place.is_dir() or (place / _TOKENIZER).is_file():
        read_tokenizer(loading).save_pretrained(out)
