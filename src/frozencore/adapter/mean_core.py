"""The mean of saved cores on one basis, which is exactly the mean of their updates.

Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ
"""

from __future__ import annotations

import math
from pathlib import Path
from unicodedata import normalize

import torch
from torch import Tensor

from frozencore.adapter.saved.adapter import SavedAdapter, require_checksum
from frozencore.adapter.saved.tensors import cores_key, require_size, vector_of
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import (
    CONFIG_FILE,
    HEADER_FILE,
    IN_A_RUN,
    PEFT_TYPE,
    UNFINISHED_FILE,
    is_tenant_name,
    read_config,
)
from frozencore.files.strict_yaml import read_yaml, require_text_keys
from frozencore.text import one_line

_WEIGHTS = (".yaml", ".yml", ".json")


def mean_core(place: str | Path, identity: str, size: int) -> dict[str, Tensor]:
    """Read the mean of saved cores, as a state dict of cores on one basis.

    Args:
        place: The folder of an adapter or a run; a folder of tenants, each with the same weight; or a YAML or JSON
            file ``NAME: weight`` in a folder of tenants. Weights are divided by their sum.
        identity: The identity of the basis.
        size: The number of values of a core on it, Σr².

    Raises:
        ConfigError: The weights are not numbers of at least 0 with a sum above 0.
        ArtifactError: There is no core, or one is damaged, not finite or of another basis or rank.
    """
    weights = weights_in(Path(place))
    total = math.fsum(weights.values())
    mean = torch.zeros(size, dtype=torch.float64)
    for folder, weight in weights.items():
        mean += weight * _core_on(folder, identity, size)
    return {cores_key(identity): (mean / total).float()}


def weights_in(place: Path) -> dict[Path, float]:
    """The adapter folders that a place names, with their relative weights; raises the errors of :func:`mean_core`."""
    if place.suffix in _WEIGHTS and place.is_file():
        found = read_yaml(place)
        weights = found.values() if isinstance(found, dict) else [math.nan]
        if not all(type(w) in (int, float) and math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
            raise ConfigError(
                f"{place} must name a weight for each tenant, `anna: 0.5`: numbers of at least 0, not all of them 0."
            )
        require_text_keys(place, found)
        exponent = math.frexp(max(weights))[1]  # a power of two, so that no sum is too large or too small
        relative: dict[Path, float] = {}
        for name, weight in found.items():
            folder = _adapter_in(place.parent / normalize("NFC", name))
            if folder in relative:
                raise ConfigError(f"{place} must name each tenant once, but {folder} comes twice.")
            relative[folder] = math.ldexp(weight, -exponent)
        return relative
    if _holds_adapter(place) is not None:
        return {_adapter_in(place): 1.0}
    # what a killed run left is hidden, or not finished
    inside = [one for one in sorted(place.iterdir()) if is_tenant_name(one.name)] if place.is_dir() else []
    whole = [one for one in inside if not (one / UNFINISHED_FILE).is_file()]
    tenants = [adapter for one in whole if (adapter := _holds_adapter(one)) is not None]
    if not tenants:
        raise ArtifactError(
            f"Training starts from a core, or from the mean of a folder of tenants, but {place} holds no adapter. Name "
            "the folder of a run, of an adapter, or of tenants."
        )
    return dict.fromkeys(tenants, 1.0)


def _holds_adapter(folder: Path) -> Path | None:
    """The folder of an adapter in a folder; None without one."""
    return next((place for place in (folder, folder / IN_A_RUN) if (place / CONFIG_FILE).is_file()), None)


def _adapter_in(folder: Path) -> Path:
    found = _holds_adapter(folder)
    if found is None:
        what = "a basis" if (folder / HEADER_FILE).is_file() else "no adapter"
        raise ArtifactError(f"A mean is that of cores, but {folder} holds {what}. Name folders of adapters.")
    return found


def _core_on(folder: Path, identity: str, size: int) -> Tensor:
    """All cores of a saved adapter as one vector; its basis must have this identity."""
    values = read_config(folder)
    kind, named = values.get("peft_type"), values.get("basis_id")
    if kind != PEFT_TYPE or not isinstance(named, str):
        held = "P and Q of its own" if kind == PEFT_TYPE else f"a {one_line(kind, 40)} adapter"
        raise ArtifactError(
            f"Training starts from cores on the named basis, but {folder} holds {held}. Name adapters that were "
            "trained with --basis."
        )
    if named != identity:
        raise ArtifactError(
            f"Training starts from cores on its own basis ({identity[:12]}), but {folder} is on {named[:12]}. Name "
            "tenants of this basis, or that basis with --basis."
        )
    require_checksum(str(folder), values)
    tensors = SavedAdapter.read(folder).tensors
    flat = vector_of(tensors)
    if flat is None or len(tensors) > 1:
        raise ArtifactError(f"Training starts from cores alone, but {folder} holds other trained modules too.")
    require_size(str(folder), flat, size)
    return flat.double()
