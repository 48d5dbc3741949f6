"""MiLoRA: the trailing singular directions of the pretrained weight (paper, appendix C; Wang et al., 2024).

    W = U Σ Vᵀ,   P = U[:, k-r:],   Q = V[:, k-r:],   k = min(m, n)

A full eigenproblem is needed: a randomised SVD finds only large directions.
"""

from __future__ import annotations

from jaxtyping import Float

from frozencore.constructors.basis_options import BasisOptions
from frozencore.constructors.constructor import Constructor, LayerEvidence
from frozencore.device import torch
from frozencore.maths.basis import Basis, Coordinates, basis_from_factors
from frozencore.maths.linalg import trailing_svd
from frozencore.maths.moments import MomentName


def milora_basis(W: Float[torch.Tensor, "m n"], rank: int, *, coordinates: Coordinates = "qr") -> Basis:
    """Take the directions that pretraining used least, in float64; singular vectors of zero singular values count."""
    U, S, V = trailing_svd(W, rank)
    return basis_from_factors(U, V, rank=len(S), spectrum=S, coordinates=coordinates)


class MiLoRA(Constructor[BasisOptions]):
    weights_only = True
    label = "MiLoRA-core"
    word = "residue"

    def needs(self, options: BasisOptions) -> frozenset[MomentName]:
        return frozenset()

    def build(self, layer: LayerEvidence, options: BasisOptions) -> Basis:
        return milora_basis(layer.weight(), options.rank, coordinates=options.coordinates)
