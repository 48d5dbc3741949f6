"""A saved adapter read as what it is: a configuration and three factors per layer, without its base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig, FrozenCoreType
from frozencore.adapter.layer import PREFIX
from frozencore.errors import ArtifactError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model.model."


@dataclass(frozen=True)
class Factors:
    """Factors of one layer: P (m x r), Q (n x r), R (r x r)."""

    P: Tensor
    Q: Tensor
    R: Tensor


def read_adapter(directory: str | Path) -> tuple[FrozenCoreConfig, dict[str, Factors]]:
    """Configuration and factors, by layer name, of a folder that ``save_pretrained`` wrote.

    Raises:
        ArtifactError: Not a folder of ours, damaged, or incomplete.
    """
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ArtifactError(
                f"An adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}, but {directory} has no {name}. "
                "Point at the folder that save_pretrained or `frozencore tune` wrote."
            )
    try:
        values = json.loads((directory / CONFIG_FILE).read_text())
        tensors = load_file(directory / WEIGHTS_FILE)
        if not isinstance(values, dict):
            raise ValueError(f"{CONFIG_FILE} is no JSON object")
    except (ValueError, OSError, SafetensorError) as error:
        raise ArtifactError(f"The adapter in {directory} is damaged ({error}). Save or download it again.") from error
    if values.get("peft_type") != FrozenCoreType.FROZENCORE.value:
        raise ArtifactError(
            f"{directory} holds a {values.get('peft_type')} adapter, not a frozen core. Read it with PEFT."
        )
    known = {field.name for field in fields(FrozenCoreConfig)}
    config = FrozenCoreConfig(**{key: value for key, value in values.items() if key in known})
    return config, layer_factors(str(directory), tensors)


def layer_factors(origin: str, tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Factors by layer name, from the tensors of an adapter file or of PEFT's adapter state dict.

    Raises:
        ArtifactError: A layer lacks one of its factors, or there is none.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, found, rest = key.removeprefix(_BASE).partition(f".{PREFIX}")
        if found:
            layers.setdefault(layer, {})[rest.removesuffix(".weight")] = tensor
    for layer, parts in layers.items():
        if parts.keys() != {"P", "Q", "R"}:
            raise ArtifactError(f"Layer {layer!r} of {origin} has {sorted(parts)} where P, Q and R are needed.")
    if not layers:
        raise ArtifactError(f"{origin} holds no frozen core. Save the adapter again.")
    return {layer: Factors(**parts) for layer, parts in layers.items()}
