"""The settings that advice compares: bases, ranks and layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from frozencore.constructors import CONSTRUCTORS, DEFAULT
from frozencore.constructors.basis_options import BasisOptions
from frozencore.maths.moments import MomentName

On = Literal["asked", "all-linear"]


@dataclass(frozen=True)
class Setting:
    """An adapter that could be trained.

    Attributes:
        method: A constructor.
        options: Options of the constructor that differ from its defaults.
        on: The requested layers, or every linear layer.
        rank: The rank of every layer; None with a budget.
        rank_budget: Trained values of all layers together; None with a rank.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    on: On = "asked"
    rank: int | None = None
    rank_budget: int | None = None

    def basis_options(self, rank: int, seed: int) -> BasisOptions:
        """The options of the bases; they are orthonormal here, because only spans are compared."""
        return CONSTRUCTORS[self.method].options(rank=rank, seed=seed, coordinates="qr", **self.options)

    @property
    def needs(self) -> frozenset[MomentName]:
        """The moments that its bases need."""
        return CONSTRUCTORS[self.method].needs(self.basis_options(1, 0))

    @property
    def spends_by_spectrum(self) -> bool:
        """Return whether the ranks come from the agreement of two halves of the examples."""
        return self.rank_budget is not None and CONSTRUCTORS[self.method].has_gains


def bases_to_try(rank: int | None, rank_budget: int | None) -> Iterator[Setting]:
    """Every constructor, the default one first, then their variants."""
    default = Setting(DEFAULT, rank=rank, rank_budget=rank_budget)
    yield default
    for name in CONSTRUCTORS:
        if name != DEFAULT:
            yield replace(default, method=name)
    for name, row in CONSTRUCTORS.items():
        for options in row.variants:
            yield replace(default, method=name, options=options)


def shapes_to_try(best: Setting, num_values: int, *, elsewhere: bool) -> Iterator[Setting]:
    """The best bases with equally many trained values in other layers or ranks.

    Args:
        elsewhere: Whether there are linear layers beside the requested ones.
    """
    if best.rank is not None and CONSTRUCTORS[best.method].has_gains:
        yield replace(best, rank=None, rank_budget=num_values)
    if elsewhere:
        yield replace(best, on="all-linear", rank=None, rank_budget=num_values)
