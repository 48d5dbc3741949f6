"""How large a saved adapter is, what it would be in other forms, and the command that makes it smaller."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from safetensors import safe_open

from frozencore.adapter.saved.tensors import FLAT, PREFIX
from frozencore.files.adapter_folder import WEIGHTS_FILE, read_config
from frozencore.words import bytes_in_words

VALUE_BYTES = 4  # of a core and of an exported LoRA: float32


def size_lines(adapter: Path) -> Iterator[str]:
    """The size of the weights of an adapter of any method.

    For a frozen core with its basis: also as cores alone and as LoRA, and how it is packed.
    """
    shapes, config = _shapes(adapter), read_config(adapter)
    stored = bytes_in_words((adapter / WEIGHTS_FILE).stat().st_size)
    factors = {key: shape for key, shape in shapes.items() if f".{PREFIX}" in key}
    if not factors:
        yield f"Size: {stored}, cores alone on their basis." if FLAT in shapes else f"Size: {stored}."
        return
    as_lora = sum(prod(shape) for key, shape in factors.items() if _side(key) in "PQ")
    values = sum(prod(shape) for key, shape in factors.items() if _side(key) == "R")
    if config.get("rounds", 1) > 1 or config.get("initial_step"):  # no other adapter can have the same bases
        yield f"Size: {stored} with its bases, {bytes_in_words(VALUE_BYTES * as_lora)} as LoRA."
        return
    alone = bytes_in_words(VALUE_BYTES * values)
    yield (
        f"Size of {values:,} trained values: {stored} with their basis, {alone} on a basis that adapters share, "
        f"{bytes_in_words(VALUE_BYTES * as_lora)} as LoRA."
    )
    yield f"Smaller: frozencore adapter pack {adapter} --output shared/{adapter.absolute().parent.name}"


def _side(key: str) -> str:
    return key.rpartition(PREFIX)[2].removesuffix(".weight")


def _shapes(adapter: Path) -> dict[str, list[int]]:
    with safe_open(adapter / WEIGHTS_FILE, framework="numpy") as file:
        return {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a mapping
