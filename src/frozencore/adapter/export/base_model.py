"""The base model that an export goes into: loaded without its code and unquantised, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer

from frozencore.errors import ModelError
from frozencore.one_line import one_line

_TOKENIZER = "tokenizer_config.json"


def load_base_model(base: str, dtype: str, safely: dict[str, bool], not_quantised: str) -> Any:
    """The model in a folder or under a hub id, of the class that it was saved as.

    Args:
        dtype: ``auto`` is that of its file.
        not_quantised: Why a quantised one is refused.

    Raises:
        ModelError: It cannot be read, or is quantised.
    """
    try:
        config = AutoConfig.from_pretrained(base, **safely)
        architecture = (config.architectures or [""])[0]
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"The base model {base} is quantised, and {not_quantised}. "
                "Name the unquantised model with base= (--base), or export a LoRA."
            )
        return getattr(transformers, architecture).from_pretrained(base, dtype=dtype, **safely)
    except (OSError, ValueError, AttributeError) as error:
        reason = one_line(error, 200)
        raise ModelError(f"The base model {base} cannot be read: {reason} Give its folder or hub id.") from error


def save_tokenizer(directory: Path, base: str, out: Path, safely: dict[str, bool]) -> None:
    """Write the tokenizer of an adapter, or of the base model, where one of them has one."""
    source = directory if (directory / _TOKENIZER).is_file() else Path(base)
    if source.is_dir() and not (source / _TOKENIZER).is_file():
        return
    AutoTokenizer.from_pretrained(source if source.is_dir() else base, **safely).save_pretrained(out)
