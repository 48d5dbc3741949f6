"""Find GGUF files, llama.cpp's format, by the name of a model; :mod:`frozencore.files.gguf_model` unpacks them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from frozencore.errors import ModelError
from frozencore.files.names import MODEL_CONFIG

_MAGIC = b"GGUF"


def find_gguf(model: str) -> Path | None:
    """The absolute path of the GGUF file of a model's name; None for a model of another kind.

    Args:
        model: A file, or a folder with one GGUF file and without ``config.json``.

    Raises:
        ModelError: The folder has several files, the file is missing or not GGUF, or the package ``gguf`` is missing.
    """
    place = Path(model)
    if place.suffix.lower() == ".gguf" and not place.is_dir():
        return _checked(place)
    if not place.is_dir() or (place / MODEL_CONFIG).exists():
        return None
    files = sorted(file for file in place.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"A model folder may hold one GGUF file, but {place} holds {names}. Name the file.")
    return _checked(files[0]) if files else None


def _checked(file: Path) -> Path:
    with file.open("rb") as opened:
        is_gguf = opened.read(len(_MAGIC)) == _MAGIC
    if not is_gguf or find_spec("gguf") is None:
        raise ModelError(
            f"To read {file.name} takes the package gguf, which is not installed: pip install 'frozencore[gguf]'."
            if is_gguf
            else f"A GGUF file begins with the letters GGUF, but {file} does not. Download it again."
        )
    return file.absolute()


def full_name(model: str) -> str:
    """The name by which a model is found from everywhere on this machine: of a GGUF file its absolute path."""
    return str(find_gguf(model) or model)


def cache_folder() -> Path:
    """The folder of unpacked models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "frozencore")
