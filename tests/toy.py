"""A basis constructor from outside of the package, with an option of its own: coordinates in a row, from an offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from pydantic import Field
from torch import Tensor

from frozencore import register_constructor
from frozencore.constructors import CONSTRUCTORS, BasisOptions, Constructor, LayerData
from frozencore.maths.basis import Basis, basis_from_factors
from frozencore.maths.moments import MomentName


@dataclass(frozen=True)
class ToyOptions(BasisOptions):
    toy_offset: Annotated[int, Field(ge=0, le=8, description="The coordinate that comes first.")] = 0


def coordinates_from(offset: int, width: int, rank: int) -> Tensor:
    return torch.eye(width)[:, offset : offset + rank]


class Toy(Constructor[ToyOptions]):
    options = ToyOptions

    def needs(self, options: ToyOptions) -> frozenset[MomentName]:
        return frozenset()

    def build(self, layer: LayerData, options: ToyOptions) -> Basis:
        P0, Q0 = (coordinates_from(options.toy_offset, width, options.rank) for width in layer.shape)
        return basis_from_factors(P0, Q0, rank=options.rank, spectrum=torch.empty(0), coordinates=options.coordinates)


TOY = Toy()


def register_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would; forgotten when the test ends."""
    monkeypatch.setitem(CONSTRUCTORS, "toy", TOY)
    del CONSTRUCTORS["toy"]
    register_constructor("toy", TOY)
