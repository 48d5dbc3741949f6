"""MiLoRA: the trailing singular directions of the pretrained weight (paper, appendix C; Wang et al., 2024).

    W = U Σ Vᵀ,   P = U[:, k-r:],   Q = V[:, k-r:],   k = min(m, n)

A full SVD is needed: a randomised SVD finds only large directions.
"""

from __future__ import annotations

from jaxtyping import Float

from frozencore.constructors.basis_options import BasisOptions
from frozencore.constructors.constructor import Constructor, LayerEvidence
from frozencore.maths.basis import Basis, Coordinates, basis_from_factors
from frozencore.maths.linalg import canonical_signs, require_finite
from frozencore.maths.moments import MomentName
from frozencore.torch_later import torch


def milora_basis(W: Float[torch.Tensor, "m n"], rank: int, *, coordinates: Coordinates = "qr") -> Basis:
    """Take the directions that pretraining used least, in float64; singular vectors of zero singular values count."""
    rank = min(rank, *W.shape)
    require_finite(W)
    U, S, Vh = torch.linalg.svd(W.double(), full_matrices=False)
    U, S, V = canonical_signs(U[:, -rank:], S[-rank:], Vh[-rank:].mT)
    return basis_from_factors(U, V, rank=rank, spectrum=S, coordinates=coordinates)


class MiLoRA(Constructor[BasisOptions]):
    weights_only = True
    label = "MiLoRA-core"

    def needs(self, options: BasisOptions) -> frozenset[MomentName]:
        return frozenset()

    def build(self, layer: LayerEvidence, options: BasisOptions) -> Basis:
        return milora_basis(layer.weight(), options.rank, coordinates=options.coordinates)
