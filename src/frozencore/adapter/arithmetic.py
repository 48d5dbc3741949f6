"""Sums of adapters: on one basis ``Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ``, exactly, with a core of the same size.

So averaging, adding and subtracting adapters is averaging, adding and subtracting their cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.directory import read_tensors, write_adapter
from frozencore.adapter.named_basis import not_one_basis
from frozencore.adapter.patterns import scale_of
from frozencore.adapter.seal.factors import Factors, layer_factors
from frozencore.adapter.seal.flat_cores import FLAT, flatten_cores, with_factors
from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.linalg import weighted_sum


def merge_adapters(adapters: Sequence[str | Path], out: str | Path, *, weights: Sequence[float] | None = None) -> Path:
    """Write the weighted sum of saved adapters of one basis, in the form of the first.

    Args:
        adapters: Folders.
        out: New folder.
        weights: One for each; by default 1/K, which is the mean.

    Raises:
        ConfigError: No adapter, or not as many finite weights.
        ArtifactError: Other layers, bases, ranks or scales, trained modules besides cores, or a folder that cannot be
            read or written.
    """
    if not adapters:
        raise ConfigError("A sum needs an adapter, but none was named.")
    weights = [1 / len(adapters)] * len(adapters) if weights is None else weights
    read = [_read(Path(folder)) for folder in adapters]
    config, first = read[0]
    for folder, (other, factors) in zip(adapters, read, strict=True):
        _require_one_basis(str(adapters[0]), (config, first), str(folder), (other, factors))
    cores = {name: weighted_sum([factors[name].R for _, factors in read], weights) for name in first}
    tensors = {FLAT: flatten_cores(cores)}
    if config.basis_id is None:
        tensors = with_factors(str(out), tensors, {name: (f.P, f.Q) for name, f in first.items()})
    return write_adapter(Path(out), tensors, like=Path(adapters[0]))


def _read(folder: Path) -> tuple[FrozenCoreConfig, Mapping[str, Factors]]:
    config, tensors = read_tensors(folder)
    if config.modules_to_save or config.trainable_token_indices:
        raise ArtifactError(
            f"Only cores are summed, but the adapter in {folder} trained other modules too (modules_to_save or "
            "trainable_token_indices)."
        )
    return config, layer_factors(str(folder), tensors)


def _require_one_basis(
    origin: str,
    one: tuple[FrozenCoreConfig, Mapping[str, Factors]],
    other_origin: str,
    other: tuple[FrozenCoreConfig, Mapping[str, Factors]],
) -> None:
    (config, mine), (other_config, theirs) = one, other
    for name in sorted(mine.keys() | theirs.keys()):
        if (
            name not in mine
            or name not in theirs
            or scale_of(config, name) != scale_of(other_config, name)
            or not _equal(mine[name].P, theirs[name].P)
            or not _equal(mine[name].Q, theirs[name].Q)
        ):
            raise not_one_basis(origin, other_origin, name)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
