"""FCCA: the SVD of the Fisher-whitened cross moment (paper, section 3.2 and Algorithm 1).

    T = D^-1/2 G A^-1/2 = U Σ Vᵀ,   P = qr(D^-1/2 U_r),   Q = qr(A^-1/2 V_r)

Shapes: G m x n, A n x n, D m x m (diagonal by default), r the rank.

RawGrad, its control, is the SVD of the cross moment without whitening (paper, appendix C):

    G = U Σ Vᵀ,   P = U_r,   Q = V_r
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from frozencore.constructors.constructor import BasisOptions, Constructor, LayerData, Options, with_cross
from frozencore.device import torch
from frozencore.maths.basis import Coordinates, LayerBasis, basis_from_factors
from frozencore.maths.linalg import SvdMethod, effective_rank, fitting_rank, truncated_svd
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.maths.whitening import InverseRoot, Whitening, WhiteningOptions
from frozencore.options import options_of


@dataclass
class FCCAOptions(WhiteningOptions, BasisOptions):
    """The metric in which the rank is cut, beside the options of every constructor."""

    @property
    def whitening(self) -> Whitening:
        return Whitening(**{name: getattr(self, name) for name in options_of(Whitening)})


def fcca_basis(
    moments: LayerMoments,
    rank: int,
    *,
    whitening: Whitening | None = None,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = BasisOptions.svd_method,
    seed: int = 0,
) -> LayerBasis:
    """Find the directions with the largest correlation between input and output error.

    Args:
        moments: G and the moments of ``whitening.needs()``.
        whitening: The metric of the truncation; both sides, diagonal, damping 1e-3 by default.

    Returns:
        A basis whose spectrum is Σ (every entry of T is an uncentred correlation). A layer without gradient gets a
        seeded random basis and effective rank 0.

    Raises:
        CalibrationError: A moment is missing or not finite, or a second moment is zero where G is not.
        ConfigError: The rank is below 1.

    >>> a, d, G = torch.ones(3), torch.ones(2), torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    >>> basis = fcca_basis(LayerMoments(1, cross=G, input_square=a, error_square=d), rank=1)
    >>> basis.P.abs().squeeze().tolist(), basis.Q.abs().squeeze().tolist()
    ([1.0, 0.0], [0.0, 1.0, 0.0])
    """
    whitening = whitening or Whitening()
    G = moments.G
    rank = fitting_rank(rank, G.shape)
    if G.any():
        A_root, D_root = whitening.inverse_roots(moments)  # line 12: A and D, damped
        T = _whitened(G, D_root, A_root, whitening)  # line 13
        U, S, V = truncated_svd(T, rank, method=svd_method, seed=seed)  # line 14
        k = effective_rank(S)
        P0, Q0 = D_root(U[:, :k].double()), A_root(V[:, :k].double())  # line 15
    else:
        P0, Q0, S = G[:, :0], G.mT[:, :0], torch.zeros(rank)
    return basis_from_factors(  # line 16
        P0, Q0, rank=rank, spectrum=S, coordinates=coordinates, seed=seed,
        diagonals=lambda: moments.diagonals(whitening.needs()),
    )  # fmt: skip


def _whitened(G: torch.Tensor, D_root: InverseRoot, A_root: InverseRoot, whitening: Whitening) -> torch.Tensor:
    if whitening.fisher == "diagonal":  # in place: G is the largest tensor in memory
        return G.mul_(D_root(G.new_ones(len(G), 1))).mul_(A_root(G.new_ones(G.shape[1], 1)).mT)
    return A_root(D_root(G).mT).mT


class WhitenedCrossMoment(Constructor[Options]):
    """A constructor that takes the leading singular directions of the cross moment in some metric."""

    @abstractmethod
    def whitening(self, options: Options) -> Whitening:
        """The metric."""

    def needs(self, options: Options) -> frozenset[MomentName]:
        return with_cross(self.whitening(options).needs(), options)

    def build(self, layer: LayerData, options: Options) -> LayerBasis:
        return fcca_basis(
            layer.data, options.r, whitening=self.whitening(options), coordinates=options.coordinates,
            svd_method=options.svd_method, seed=layer.seed(options.seed),
        )  # fmt: skip


class FCCA(WhitenedCrossMoment[FCCAOptions]):
    options = FCCAOptions
    basis_source = "Fisher"
    label = "FCCA"

    def whitening(self, options: FCCAOptions) -> Whitening:
        return options.whitening


def rawgrad_basis(
    moments: LayerMoments,
    rank: int,
    *,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = BasisOptions.svd_method,
    seed: int = 0,
) -> LayerBasis:
    """Take the leading singular directions of the loss gradient: no basis of rank r has a larger ``‖PᵀGQ‖_F``.

    >>> rawgrad_basis(LayerMoments(1, cross=torch.diag(torch.tensor([1.0, 3.0]))), rank=1).Q.abs().squeeze().tolist()
    [0.0, 1.0]
    """
    none = Whitening(whiten="none")
    return fcca_basis(moments, rank, whitening=none, coordinates=coordinates, svd_method=svd_method, seed=seed)


class RawGrad(WhitenedCrossMoment[BasisOptions]):
    label = "RawGrad"
    basis_source = "gradient"

    def whitening(self, options: BasisOptions) -> Whitening:
        return Whitening(whiten="none")
