"""Singular directions of the pretrained weight, leading (LoRA-XS) or trailing (MiLoRA; paper, appendix C).

    W = U Σ Vᵀ,   LoRA-XS (Bałazy et al., 2024):  P₀ = U_r Σ_r,   Q₀ = V_r
                  MiLoRA (Wang et al., 2024):     P = U[:, k-r:],   Q = V[:, k-r:],   k = min(m, n)

The thin QR of U Σ is U up to sign, so Σ matters only with the coordinates ``"raw"`` and ``"scaled_raw"``. MiLoRA needs
a full eigenproblem: a randomised SVD finds only large directions.
"""

from __future__ import annotations

from jaxtyping import Float

from frozencore.constructors.constructor import BasisOptions, Constructor, LayerData
from frozencore.device import torch
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.linalg import SvdMethod, effective_rank, fitting_rank, trailing_svd, truncated_svd


def lora_xs_basis(
    W: Float[torch.Tensor, "m n"],
    rank: int,
    *,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = BasisOptions.svd_method,
    seed: int = 0,
) -> LayerBasis:
    """Take the directions that pretraining used most; the task is ignored.

    >>> lora_xs_basis(torch.diag(torch.tensor([1.0, 3.0])), rank=1).P.abs().squeeze().tolist()
    [0.0, 1.0]
    """
    rank = fitting_rank(rank, W.shape)
    U, S, V = truncated_svd(W.float(), rank, method=svd_method, seed=seed)
    k = effective_rank(S)
    return basis_from_factors(U[:, :k] * S[:k], V[:, :k], rank=rank, spectrum=S, coordinates=coordinates, seed=seed)


class LoRAXS(Constructor[BasisOptions]):
    """LoRA-XS. The seed is always 0: the basis depends on the weight alone."""

    weights_only = True
    label = "LoRA-XS-core"
    basis_source = "weights"

    def build(self, layer: LayerData, options: BasisOptions) -> LayerBasis:
        return lora_xs_basis(
            layer.weight(), options.r, coordinates=options.coordinates, svd_method=options.svd_method,
            seed=layer.seed(0),
        )  # fmt: skip


def milora_basis(W: Float[torch.Tensor, "m n"], rank: int, *, coordinates: Coordinates = "qr") -> LayerBasis:
    """Take the directions that pretraining used least, in float64; singular vectors of zero singular values count.

    >>> milora_basis(torch.diag(torch.tensor([1.0, 3.0])), rank=1).P.abs().squeeze().tolist()
    [1.0, 0.0]
    """
    U, S, V = trailing_svd(W, rank)
    return basis_from_factors(U, V, rank=len(S), spectrum=S, coordinates=coordinates)


class MiLoRA(Constructor[BasisOptions]):
    weights_only = True
    label = "MiLoRA-core"
    basis_source = "residue"

    def build(self, layer: LayerData, options: BasisOptions) -> LayerBasis:
        return milora_basis(layer.weight(), options.r, coordinates=options.coordinates)
