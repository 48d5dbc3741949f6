"""Report on the layers of a saved adapter or basis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from frozencore.adapter.basis import Basis, load_basis
from frozencore.adapter.folders import read_adapter
from frozencore.files.names import HEADER_FILE
from frozencore.text import natural_sort_key


@dataclass(frozen=True)
class LayerReport:
    """The basis and the core of one layer.

    Attributes:
        num_values: r².
        core_norm: ``‖R‖_F``, the distance that training moved the core.
    """

    shape: tuple[int, int]
    rank: int
    num_values: int
    basis_bytes: int
    orthonormality_error: float
    core_norm: float


@dataclass(frozen=True)
class AdapterReport:
    """A saved basis, or an adapter on it.

    Attributes:
        bits: Bits of a value of the core; None for a basis alone.
    """

    basis: Basis
    layers: dict[str, LayerReport]
    bits: int | None = None


def read_report(folder: Path) -> AdapterReport:
    """Read the folder of an adapter or a basis, and report on its layers."""
    if (folder / HEADER_FILE).is_file():
        basis = load_basis(folder)
        return AdapterReport(basis, inspect_adapter(basis))
    saved = read_adapter(folder)
    basis = saved.find_basis()
    return AdapterReport(basis, inspect_adapter(basis, saved.core.by_layer(basis.ranks)), saved.core.bits)


def inspect_adapter(basis: Basis, cores: Mapping[str, Tensor] | None = None) -> dict[str, LayerReport]:
    """Report on every layer of a saved adapter, in the order of layer numbers.

    Args:
        cores: R by layer name; zero without them.
    """
    return {
        name: LayerReport(
            shape=(len(layer.P), len(layer.Q)),
            rank=layer.rank,
            num_values=layer.rank**2,
            basis_bytes=layer.num_bytes,
            orthonormality_error=layer.orthonormality_error(),
            core_norm=0.0 if cores is None else float(cores[name].norm()),
        )
        for name, layer in sorted(basis.layers.items(), key=lambda item: natural_sort_key(item[0]))
    }
