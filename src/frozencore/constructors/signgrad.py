"""SignGrad: the SVD of the sign of the cross moment, after LoRA-SB (arXiv 2411.19557).

    sign(G) = U Σ Vᵀ,   P = U_r,   Q = V_r;   optional start R₀ = -η P⁺ [sign(G)]_r Q⁺ᵀ / s

The sign is the first step of AdamW in full fine-tuning. The paper does not have this method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from frozencore.constructors.constructor import BasisOptions, Constructor, LayerData, with_cross
from frozencore.device import torch
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.linalg import SvdMethod, effective_rank, fitting_rank, truncated_svd
from frozencore.maths.moments import LayerMoments, MomentName


@dataclass
class SignGradOptions(BasisOptions):
    """The core that training starts from."""

    initial_step: Annotated[float, "Start from the core of one sign step of this size; 0 is zero."] = 0.0


def signgrad_basis(
    moments: LayerMoments,
    rank: int,
    *,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = BasisOptions.svd_method,
    seed: int = 0,
) -> LayerBasis:
    """Take the leading singular directions of ``sign(G)``; ``initial_core`` is the best rank-r copy of one sign step.

    The adapter multiplies ``initial_core`` by the chosen step over its scale, or ignores it.

    >>> G = torch.tensor([[0.1, -5.0], [0.2, -7.0]])
    >>> basis = signgrad_basis(LayerMoments(1, cross=G), rank=1)
    >>> (basis.P @ basis.initial_core @ basis.Q.mT).round(decimals=4).tolist()  # minus the sign of G
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    sign = moments.G.sign()
    rank = fitting_rank(rank, sign.shape)
    U, S, V = truncated_svd(sign, rank, method=svd_method, seed=seed)
    k = effective_rank(S)
    basis = basis_from_factors(
        U[:, :k], V[:, :k], rank=rank, spectrum=S, coordinates=coordinates, seed=seed,
        diagonals=lambda: (moments.d, moments.a),
    )  # fmt: skip
    # Pseudo-inverses, because P and Q are orthonormal in some coordinates only.
    left, right = torch.linalg.pinv(basis.P.double()), torch.linalg.pinv(basis.Q.double())
    core = -(left @ U[:, :k].double()) @ S[:k].double().diag() @ (right @ V[:, :k].double()).mT
    return replace(basis, initial_core=core.float())


class SignGrad(Constructor[SignGradOptions]):
    options = SignGradOptions
    label = "SignGrad"
    basis_source = "signs"

    def needs(self, options: SignGradOptions) -> frozenset[MomentName]:
        return with_cross(frozenset(), options)

    def build(self, layer: LayerData, options: SignGradOptions) -> LayerBasis:
        return signgrad_basis(
            layer.data, options.r, coordinates=options.coordinates, svd_method=options.svd_method,
            seed=layer.seed(options.seed),
        )  # fmt: skip

    def start_core(self, basis: LayerBasis, options: SignGradOptions, scale: float) -> torch.Tensor | None:
        if not options.initial_step or basis.initial_core is None:
            return None
        return basis.initial_core * (options.initial_step / scale)
