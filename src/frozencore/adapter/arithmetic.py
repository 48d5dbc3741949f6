"""Sums of adapters: on one basis ``Σ wᵢ·P Rᵢ Qᵀ = P (Σ wᵢ Rᵢ) Qᵀ``, exactly, with a core of the same size.

So averaging, adding and subtracting adapters is averaging, adding and subtracting their cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.directory import read_tensors, write_adapter
from frozencore.adapter.named_basis import Placed, require_one_basis
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
    for folder, other in zip(adapters, read, strict=True):
        require_one_basis(str(adapters[0]), placed(*read[0]), str(folder), placed(*other))
    cores = {name: weighted_sum([factors[name].R for _, factors in read], weights) for name in first}
    tensors = {FLAT: flatten_cores(cores)}
    if config.basis_id is None:
        tensors = with_factors(str(out), tensors, {name: (f.P, f.Q) for name, f in first.items()})
    return write_adapter(Path(out), tensors, like=Path(adapters[0]))


def _read(folder: Path) -> tuple[FrozenCoreConfig, Mapping[str, Factors]]:
    config, tensors = read_tensors(folder)
    config.require_one_round("A sum")
    if config.trains_modules:
        raise ArtifactError(
            f"Only cores are summed, but the adapter in {folder} trained other modules too (modules_to_save or "
            "trainable_token_indices)."
        )
    return config, layer_factors(str(folder), tensors)


def placed(config: FrozenCoreConfig, factors: Mapping[str, Factors]) -> dict[str, Placed]:
    """P, Q and the scale of each layer of a saved adapter."""
    return {name: (f.P, f.Q, scale_of(config, name)) for name, f in factors.items()}
