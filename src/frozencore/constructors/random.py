"""Random: an independent orthonormal pair for every layer and seed (paper, appendix C)."""

from __future__ import annotations

from frozencore.constructors.basis_options import BasisOptions
from frozencore.constructors.constructor import Constructor, LayerEvidence
from frozencore.device import torch
from frozencore.maths.basis import Basis, Coordinates, basis_from_factors
from frozencore.maths.linalg import seeded_generator
from frozencore.maths.moments import MomentName


def random_basis(shape: tuple[int, int], rank: int, *, coordinates: Coordinates = "qr", seed: int = 0) -> Basis:
    """Draw Gaussian m x r and n x r matrices and orthonormalise them."""
    rank = min(rank, *shape)
    P0, Q0 = (
        torch.randn(width, rank, generator=seeded_generator(seed, "random", side))
        for side, width in zip(("P", "Q"), shape, strict=True)
    )
    return basis_from_factors(P0, Q0, rank=rank, spectrum=torch.empty(0), coordinates=coordinates)


class Random(Constructor[BasisOptions]):
    label = "Random"
    word = "chance"

    def needs(self, options: BasisOptions) -> frozenset[MomentName]:
        return frozenset()

    def build(self, layer: LayerEvidence, options: BasisOptions) -> Basis:
        return random_basis(layer.shape, options.rank, coordinates=options.coordinates, seed=layer.seed(options.seed))
