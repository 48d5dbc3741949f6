"""A LoRA directory as serving engines read it: the configuration, and the names, shapes and types of its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from frozencore.errors import ArtifactError
from frozencore.files.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from frozencore.words import one_line

_SIDES = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"
}  # fmt: skip
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class TensorFacts:
    """Shape, dtype and soundness of a stored tensor, without its values."""

    shape: tuple[int, ...]
    dtype: str
    finite: bool


@dataclass(frozen=True)
class LoraDirectory:
    """Configuration, tensors by key, and the names of all files.

    Attributes:
        factors: The facts of ``"A"`` and ``"B"`` by module; either may be missing.
        others: Keys of tensors that are no LoRA factors.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorFacts]
    files: frozenset[str]
    factors: Mapping[str, Mapping[str, TensorFacts]]
    others: tuple[str, ...]

    @property
    def is_tenant(self) -> bool:
        """True if all factors are on ``core`` layers, which only basis models have."""
        return bool(self.factors) and all(module.endswith(".core") for module in self.factors)

    @property
    def pairs(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Module, shape of A and shape of B, of modules that have both."""
        return [(m, s["A"].shape, s["B"].shape) for m, s in self.factors.items() if s.keys() == {"A", "B"}]

    def mapping(self, name: str) -> dict[str, Any]:
        """A field of the configuration if it is a mapping, else an empty one."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def ranks(self) -> list[Any]:
        """r and the values of ``rank_pattern``."""
        return [self.config.get("r"), *self.mapping("rank_pattern").values()]

    @property
    def largest_rank(self) -> int | None:
        """The largest rank; None where a rank is no positive number."""
        numbers = [rank for rank in self.ranks if isinstance(rank, int) and rank > 0]
        return max(numbers) if len(numbers) == len(self.ranks) else None


def read_lora_directory(directory: str | Path) -> LoraDirectory:
    """Read a directory that may be of any PEFT method."""
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ArtifactError(f"A LoRA directory holds {CONFIG_FILE} and {WEIGHTS_FILE}; {directory} has no {name}.")
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
            tensors = {key: _facts(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (ValueError, OSError, SafetensorError, RecursionError, RuntimeError) as error:
        raise ArtifactError(f"{directory} is damaged ({one_line(error, 200)}). Save or download it again.") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{directory / CONFIG_FILE} holds no JSON object. Save or download it again.")
    factors: dict[str, dict[str, TensorFacts]] = {}
    others = []
    for key, facts in tensors.items():
        ending = next((ending for ending in _SIDES if key.startswith(_PREFIX) and key.endswith(ending)), None)
        if ending is None:
            others.append(key)
        else:
            factors.setdefault(key.removeprefix(_PREFIX).removesuffix(ending), {})[_SIDES[ending]] = facts
    files = frozenset(path.name for path in directory.iterdir())
    return LoraDirectory(config, tensors, files, factors, tuple(others))


def _facts(tensor: torch.Tensor) -> TensorFacts:
    finite = bool(torch.isfinite(tensor.float()).all()) if tensor.dtype.is_floating_point else True
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), finite)
