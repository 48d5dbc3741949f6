"""FCCA: the SVD of the Fisher-whitened cross moment (paper, section 3.2 and Algorithm 1).

    T = D^-1/2 G A^-1/2 = U Σ Vᵀ,   P = qr(D^-1/2 U_r),   Q = qr(A^-1/2 V_r)

Shapes: G m x n, A n x n, D m x m (diagonal by default), r the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from pydantic import Field

from frozencore.constructors.options import BasisOptions
from frozencore.maths.basis import Basis, Coordinates, basis_from_factors
from frozencore.maths.linalg import SvdMethod, TruncatedSVD, effective_rank, truncated_svd
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Damping, Fisher, InverseRoot, Share, Sides, Whitening
from frozencore.torch_later import torch


@dataclass(frozen=True)
class FCCAOptions(BasisOptions):
    """The metric in which the rank is cut; see :class:`frozencore.maths.whitening.Whitening`."""

    whiten: Annotated[Sides, Field(description="Sides that are whitened.")] = Whitening.sides
    fisher: Annotated[Fisher, Field(description="Diagonal moments, or dense factors (K-FAC).")] = Whitening.fisher
    shrinkage: Annotated[Share, Field(description="Share of the diagonal in dense factors.")] = Whitening.shrinkage
    damping: Annotated[
        Damping, Field(description="Damping relative to the mean second moment; two for the input and the output side.")
    ] = Whitening.damping

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whitening  # noqa: B018  # refuses what does not go together

    @property
    def whitening(self) -> Whitening:
        return Whitening(self.whiten, self.fisher, self.shrinkage, self.damping)


def fcca_basis(
    moments: LayerMoments,
    rank: int,
    *,
    whitening: Whitening | None = None,
    coordinates: Coordinates = "qr",
    svd_method: SvdMethod = BasisOptions.svd_method,
    seed: int = 0,
) -> Basis:
    """Directions with the largest correlation between input and output error.

    Args:
        moments: Holds G and what ``whitening.needs()`` names.
        whitening: The metric of the truncation; both sides, diagonal, damping 1e-3 by default.

    Returns:
        A basis whose spectrum is Σ (every entry of T is an uncentred correlation). A layer without gradient gets a
        seeded random basis and effective rank 0.

    Raises:
        CalibrationError: A moment is missing or not finite, or a second moment is zero where G is not.
    """
    whitening = whitening or Whitening()
    G = moments.G
    rank = min(rank, *G.shape)
    if not G.any():
        return basis_from_factors(
            G[:, :0], G.mT[:, :0], rank=rank, spectrum=torch.zeros(rank), coordinates=coordinates,
            energies=lambda: moments.energies(whitening.needs()), seed=seed,
        )  # fmt: skip
    A_root, D_root = whitening.input_root(moments), whitening.output_root(moments)
    svd = truncated_svd(_whitened(G, A_root, D_root, whitening), rank, method=svd_method, seed=seed)
    return _unwhitened(svd, A_root, D_root, moments, whitening, rank=rank, coordinates=coordinates, seed=seed)


def fcca_basis_of_svd(
    svd: TruncatedSVD,
    diagonals: LayerMoments,
    rank: int,
    *,
    whitening: Whitening,
    coordinates: Coordinates = "qr",
    seed: int = 0,
) -> Basis:
    """The basis of :func:`fcca_basis` from the leading singular triples of T instead of G.

    Args:
        svd: No triples at all for a layer without gradient.
        diagonals: Holds what ``whitening.needs()`` names, and a and d for ``fisher`` coordinates.
    """
    rank = min(rank, len(svd.U), len(svd.V))
    if len(svd.S) == 0:
        return basis_from_factors(
            svd.U, svd.V, rank=rank, spectrum=torch.zeros(rank), coordinates=coordinates,
            energies=lambda: diagonals.energies(whitening.needs()), seed=seed,
        )  # fmt: skip
    A_root, D_root = whitening.input_root(diagonals), whitening.output_root(diagonals)
    return _unwhitened(svd, A_root, D_root, diagonals, whitening, rank=rank, coordinates=coordinates, seed=seed)


def whitened_cross_moment(moments: LayerMoments, whitening: Whitening) -> Float[torch.Tensor, "m n"]:
    """``T = D^-1/2 G A^-1/2``; zero where G is.

    Raises:
        CalibrationError: As :func:`fcca_basis`.
    """
    G = moments.G
    if not G.any():
        return G
    return _whitened(G, whitening.input_root(moments), whitening.output_root(moments), whitening)


def _whitened(G: torch.Tensor, A_root: InverseRoot, D_root: InverseRoot, whitening: Whitening) -> torch.Tensor:
    if whitening.fisher == "diagonal":  # in place: G is the largest thing in memory
        return G.mul_(D_root(G.new_ones(len(G), 1))).mul_(A_root(G.new_ones(G.shape[1], 1)).mT)
    return A_root(D_root(G).mT).mT


def _unwhitened(
    svd: TruncatedSVD,
    A_root: InverseRoot,
    D_root: InverseRoot,
    moments: LayerMoments,
    whitening: Whitening,
    *,
    rank: int,
    coordinates: Coordinates,
    seed: int,
) -> Basis:
    U, S, V = svd
    k = effective_rank(S)
    P0, Q0 = D_root(U[:, :k].double()), A_root(V[:, :k].double())
    return basis_from_factors(
        P0, Q0, rank=rank, spectrum=S, coordinates=coordinates, seed=seed,
        energies=lambda: moments.energies(whitening.needs()),
    )  # fmt: skip
