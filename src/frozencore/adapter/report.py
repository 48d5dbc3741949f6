"""Report on the layers of a saved adapter or basis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from frozencore.adapter.basis import Basis
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
            basis_bytes=sum(X.numel() * X.element_size() for X in (layer.P, layer.Q)),
            orthonormality_error=layer.orthonormality_error(),
            core_norm=0.0 if cores is None else float(cores[name].norm()),
        )
        for name, layer in sorted(basis.layers.items(), key=lambda item: natural_sort_key(item[0]))
    }
