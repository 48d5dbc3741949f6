"""RawGrad: the SVD of the cross moment without whitening, the control of FCCA (paper, appendix C).

G = U Σ Vᵀ,   P = U_r,   Q = V_r
"""

from __future__ import annotations

from frozencore.constructors.constructor import BasisOptions
from frozencore.constructors.fcca import WhitenedCrossMoment, fcca_basis
from frozencore.maths.basis import Basis, Coordinates
from frozencore.maths.linalg import SvdMethod
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening


def rawgrad_basis(
    moments: LayerMoments,
    rank: int,
    *,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = BasisOptions.svd_method,
    seed: int = 0,
) -> Basis:
    """Take the leading singular directions of the loss gradient: no basis of rank r has a larger ``‖PᵀGQ‖_F``."""
    return fcca_basis(
        moments,
        rank,
        whitening=Whitening(sides="none"),
        coordinates=coordinates,
        svd_method=svd_method,
        seed=seed,
    )


class RawGrad(WhitenedCrossMoment[BasisOptions]):
    label = "RawGrad"
    word = "gradient"

    def whitening(self, options: BasisOptions) -> Whitening:
        return Whitening(sides="none")
