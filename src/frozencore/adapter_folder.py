"""The files of an adapter folder: their names, the configuration as it is, and what is said where one is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError
from frozencore.one_line import one_line

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
HEADER_FILE, FACTORS_FILE = "basis.json", "basis.safetensors"  # of a basis in a folder of its own
MODEL_CONFIG, BASIS_MODEL_TYPE = "config.json", "frozencore_basis_model"
PEFT_TYPE = "FROZENCORE"
LARGEST_CONFIG = 2**24


def read_config(directory: Path) -> dict[str, Any]:
    """``adapter_config.json`` as it is.

    Raises:
        ArtifactError: It is missing, damaged, too large, or no JSON object.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ArtifactError(missing(directory, CONFIG_FILE))
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"{CONFIG_FILE} is larger than {LARGEST_CONFIG:,} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{CONFIG_FILE} is no JSON object")
    except (ValueError, OSError, RecursionError) as error:
        raise damaged(directory, error) from error
    return values


def bytes_of(path: Path) -> bytes:
    """A whole file of an adapter folder.

    Raises:
        ArtifactError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path.parent, error) from error


def missing(directory: Path, name: str) -> str:
    """What is said of a file that is not there."""
    if name == WEIGHTS_FILE and (directory / PICKLE_FILE).exists():
        return (
            f"Weights are read from {WEIGHTS_FILE}, but {directory} holds {PICKLE_FILE}: a pickle can run code and is "
            "never opened. Ask for the adapter as safetensors."
        )
    return (
        f"An adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}, but {directory} has no {name}. "
        "Point at the folder that save_pretrained or `frozencore tune` wrote."
    )


def damaged(directory: Path, error: Exception) -> ArtifactError:
    """What is raised for a folder that cannot be read, and why."""
    reason = one_line(error, 200)
    return ArtifactError(f"The adapter in {directory} is damaged ({reason}). Save or download it again.")
