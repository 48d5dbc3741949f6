"""Random directions (paper, appendix C).

Random: an independent orthonormal pair for every layer and seed. VeRA: one seeded pair of random matrices, shared by
all layers and sliced to each (Kopiczko et al., 2024).
"""

from __future__ import annotations

from frozencore.constructors.constructor import BasisOptions, Constructor, LayerData
from frozencore.device import torch
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.linalg import fitting_rank, seeded_generator


def random_basis(shape: tuple[int, int], rank: int, *, coordinates: Coordinates = "qr", seed: int = 0) -> LayerBasis:
    """Draw Gaussian m x r and n x r matrices and orthonormalise them.

    >>> basis = random_basis((6, 4), rank=2, seed=1)
    >>> basis.P.shape, basis.orthonormality_error() < 1e-6
    (torch.Size([6, 2]), True)
    """
    rank = fitting_rank(rank, shape)
    P0, Q0 = (
        torch.randn(width, rank, generator=seeded_generator(seed, "random", side), dtype=torch.float32, device="cpu")
        for side, width in zip(("P", "Q"), shape, strict=True)
    )
    return basis_from_factors(P0, Q0, rank=rank, spectrum=torch.empty(0), coordinates=coordinates)


class Random(Constructor[BasisOptions]):
    label = "Random"
    basis_source = "chance"

    def build(self, layer: LayerData, options: BasisOptions) -> LayerBasis:
        return random_basis(layer.shape, options.r, coordinates=options.coordinates, seed=layer.seed(options.seed))


BLOCK_ROWS = 1024


def vera_basis(shape: tuple[int, int], rank: int, *, coordinates: Coordinates = "qr", seed: int = 0) -> LayerBasis:
    """Take the first m and n rows (and r columns) of the shared pair, orthonormalised; all layers use one seed.

    >>> torch.equal(vera_basis((6, 4), rank=2).Q, vera_basis((8, 4), rank=2).Q)
    True
    """
    rank = fitting_rank(rank, shape)
    P0, Q0 = (shared_rows(width, rank, seed, side) for side, width in zip(("P", "Q"), shape, strict=True))
    return basis_from_factors(P0, Q0, rank=rank, spectrum=torch.empty(0), coordinates=coordinates)


def shared_rows(num_rows: int, rank: int, seed: int, side: str) -> torch.Tensor:
    """The leading rows and columns of an endless Gaussian matrix, drawn in blocks so that slices agree at any size."""
    num_blocks = -(-num_rows // BLOCK_ROWS)
    columns = []
    for column in range(rank):
        generators = (seeded_generator(seed, "vera", side, column, block) for block in range(num_blocks))
        blocks = [torch.randn(BLOCK_ROWS, generator=one, dtype=torch.float32, device="cpu") for one in generators]
        columns.append(torch.cat(blocks))
    return torch.stack(columns, dim=1)[:num_rows]


class VeRA(Constructor[BasisOptions]):
    """VeRA. It ignores the seed of the layer, because all layers share one pair of matrices."""

    label = "VeRA-core"
    basis_source = "shared"

    def build(self, layer: LayerData, options: BasisOptions) -> LayerBasis:
        return vera_basis(layer.shape, options.r, coordinates=options.coordinates, seed=options.seed)
