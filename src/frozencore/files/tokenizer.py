"""Read the tokenizer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from frozencore.files.names import TOKENIZER_FILE, TOKENIZER_FILES


def read_tokenizer(loading: dict[str, Any]) -> Any:
    """Read the tokenizer of a model; refuse the one without words that transformers makes where there is none.

    Args:
        loading: The arguments of :func:`frozencore.files.hub.safe_loading`.
    """
    tokenizer = AutoTokenizer.from_pretrained(**loading)
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ValueError("its tokenizer knows no words, as tokenizer.json or its like is missing.")
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer is saved in a folder."""
    return (folder / TOKENIZER_FILE).is_file()


def tokenizer_content(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer that is saved in a folder, by name; empty without one."""
    files = [folder / name for name in TOKENIZER_FILES] if has_tokenizer(folder) else []
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer that is saved in a folder to another one; without one nothing is copied."""
    for name, content in tokenizer_content(folder).items():
        (out / name).write_bytes(content)


def with_own_tokenizer(folder: Path, loading: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the tokenizer that a trainer saved in an adapter's folder; else those for the base model's."""
    if not has_tokenizer(folder):
        return loading
    return {**loading, "pretrained_model_name_or_path": str(folder), "local_files_only": True}
