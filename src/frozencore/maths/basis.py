"""A basis: the two frozen factors P and Q of ``y = (W + s·P R Qᵀ) x``, and the coordinates they are written in.

A constructor chooses the spans and hands over raw factors P₀, Q₀. Coordinates do not change a span; they decide how
the core R sees it (paper, section 3.3): ``P₀ Z Q₀ᵀ = P (T_P Z T_Qᵀ) Qᵀ`` for ``P₀ = P T_P``, ``Q₀ = Q T_Q``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float

from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.linalg import complete_orthonormal, polar_factor, seeded_generator, thin_qr
from frozencore.torch_later import torch

Coordinates = Literal["qr", "raw", "scaled_raw", "polar"]
COORDINATES: tuple[str, ...] = get_args(Coordinates)
ORTHONORMAL_COORDINATES: frozenset[str] = frozenset({"qr", "polar"})


@dataclass(frozen=True)
class Basis:
    """Frozen factors of one layer.

    Attributes:
        P: Output-side factor, m x r; orthonormal columns in ``qr`` and ``polar`` coordinates.
        Q: Input-side factor, n x r.
        spectrum: The constructor's singular values or eigenvalues, largest first; empty where it has none.
        effective_rank: How many of the r directions come from data or weights; the rest are seeded completions.
        initial_core: Core to start from, r x r, for a unit step and unit scale; None means zero.
    """

    P: Float[torch.Tensor, "m r"]
    Q: Float[torch.Tensor, "n r"]
    spectrum: Float[torch.Tensor, " k"]
    effective_rank: int
    initial_core: Float[torch.Tensor, "r r"] | None = None

    @property
    def rank(self) -> int:
        return self.P.shape[1]

    def orthonormality_error(self) -> float:
        """The largest entry of ``|PᵀP - I|`` and ``|QᵀQ - I|``."""
        identity = torch.eye(self.rank, dtype=torch.float64, device=self.P.device)
        return max(float((X.double().mT @ X.double() - identity).abs().max()) for X in (self.P, self.Q))


def known_basis(P: Float[torch.Tensor, "m r"], Q: Float[torch.Tensor, "n r"]) -> Basis:
    """A basis of which no more than its factors is known, as of one that was saved."""
    return Basis(P, Q, spectrum=torch.empty(0), effective_rank=P.shape[1])


def basis_from_factors(
    P0: Float[torch.Tensor, "m p"],
    Q0: Float[torch.Tensor, "n q"],
    *,
    rank: int,
    spectrum: Float[torch.Tensor, " k"],
    coordinates: Coordinates,
    seed: int = 0,
) -> Basis:
    """Write the spans of two raw factors in the chosen coordinates and fill missing directions.

    Args:
        P0, Q0: Raw factors that hold meaningful columns only; at most ``rank`` of them each. Fewer (a
            rank-deficient moment) are completed with seeded orthonormal directions.
        rank: Columns of the result, at most ``min(m, n)``.

    Raises:
        CalibrationError: A factor is not finite (QR would return something plausible).
    """
    for side, factor in (("P", P0), ("Q", Q0)):
        if not torch.isfinite(factor).all():
            raise CalibrationError(f"Raw basis {side} holds NaN or Inf. Check the moments it was made from.")
    P, Q = (
        complete_orthonormal(_write_in(X.double(), coordinates), rank, seeded_generator(seed, "complete", side))
        for side, X in (("P", P0), ("Q", Q0))
    )
    return Basis(P=P.float(), Q=Q.float(), spectrum=spectrum.float(), effective_rank=min(P0.shape[1], Q0.shape[1]))


def _write_in(X: torch.Tensor, coordinates: Coordinates) -> torch.Tensor:
    if X.shape[1] == 0 or coordinates == "raw":
        return X
    if coordinates == "qr":
        return thin_qr(X)[0]
    if coordinates == "polar":
        return polar_factor(X)
    if coordinates == "scaled_raw":  # one scalar gives the Frobenius norm of an orthonormal factor
        return X * (X.shape[1] ** 0.5 / X.norm())
    raise ConfigError(f"coordinates must be one of {', '.join(COORDINATES)}, but {coordinates!r} came.")
