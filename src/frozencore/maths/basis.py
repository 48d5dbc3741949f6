"""A basis: the two frozen factors P and Q of ``y = (W + s·P R Qᵀ) x``, and the coordinates they are written in.

A constructor chooses the spans and returns raw factors P₀, Q₀. Coordinates do not change a span, but they change the
core R that gives an update (paper, section 3.3): ``P₀ Z Q₀ᵀ = P (T_P Z T_Qᵀ) Qᵀ`` for ``P₀ = P T_P``, ``Q₀ = Q T_Q``.

Fisher coordinates are orthonormal in the metric of the data (docs/method.md). With A and D the diagonal second moments
of the layer's inputs and output errors,

    QᵀAQ = mean(a)·I,   PᵀDP = mean(d)·I

so every column of Q has the input energy of a random unit direction, whichever constructor chose the span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from jaxtyping import Float

from frozencore.device import torch
from frozencore.maths.linalg import complete_orthonormal, inverse_root, require_finite, seeded_generator, thin_qr

Coordinates = Literal["fisher", "qr", "raw", "scaled_raw"]
Diagonals = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""The diagonal second moments of a layer's output errors (m) and inputs (n); None if the constructor reads none."""
LEAST_ENERGY = 1e-3  # relative to the mean channel's: no column is longer than 32


@dataclass(frozen=True)
class LayerBasis:
    """Frozen factors of one layer.

    Attributes:
        P: Output-side factor, m x r. Columns are orthonormal in ``qr`` coordinates; in ``fisher``
            coordinates they are orthonormal in the metric of the moments.
        Q: Input-side factor, n x r.
        spectrum: The constructor's singular values or eigenvalues, largest first; empty if it has none.
        effective_rank: The number of directions from data or weights; the other directions are seeded random ones.
        initial_core: The core to start from, r x r, for a unit step and unit scale; None means zero.
        scale: The scale s of the layer's adapter; a constructor does not know it.
    """

    P: Float[torch.Tensor, "m r"]
    Q: Float[torch.Tensor, "n r"]
    spectrum: Float[torch.Tensor, " k"]
    effective_rank: int
    initial_core: Float[torch.Tensor, "r r"] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.P.ndim == self.Q.ndim == 2 or self.P.shape[1] != self.Q.shape[1]:
            raise ValueError(f"P is m x r and Q n x r, but {tuple(self.P.shape)} and {tuple(self.Q.shape)} were given")

    @property
    def rank(self) -> int:
        return self.P.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of P and Q."""
        return self.P.nbytes + self.Q.nbytes

    @property
    def is_set(self) -> bool:
        """Whether P was set: it is zero in an adapter that was never calibrated, and has no values on meta."""
        return not self.P.is_meta and bool(self.P.any())

    def to(self, device: torch.device | str) -> LayerBasis:
        """The same basis on another device."""
        core = self.initial_core
        return replace(
            self, P=self.P.to(device), Q=self.Q.to(device), spectrum=self.spectrum.to(device),
            initial_core=None if core is None else core.to(device),
        )  # fmt: skip

    def orthonormality_error(self) -> float:
        """The largest entry of ``|PᵀP - I|`` and ``|QᵀQ - I|``."""
        identity = torch.eye(self.rank, dtype=torch.float64, device=self.P.device)
        return max(float((X.double().mT @ X.double() - identity).abs().max()) for X in (self.P, self.Q))


def known_basis(P: Float[torch.Tensor, "m r"], Q: Float[torch.Tensor, "n r"], scale: float = 1.0) -> LayerBasis:
    """Make a basis from factors alone, for instance saved ones."""
    return LayerBasis(P, Q, spectrum=torch.empty(0), effective_rank=P.shape[1], scale=scale)


def basis_from_factors(
    P0: Float[torch.Tensor, "m p"],
    Q0: Float[torch.Tensor, "n q"],
    *,
    rank: int,
    spectrum: Float[torch.Tensor, " k"],
    coordinates: Coordinates,
    diagonals: Callable[[], Diagonals] | None = None,
    seed: int = 0,
) -> LayerBasis:
    """Write the spans of two raw factors in the chosen coordinates and fill missing directions.

    Args:
        P0, Q0: Raw factors, with meaningful columns only and at most ``rank`` of them. If there are fewer (a
            rank-deficient moment), seeded orthonormal directions are added.
        rank: Columns of the result, at most ``min(m, n)``.
        diagonals: Returns the diagonals d and a for ``fisher`` coordinates. A side without a diagonal, or with an
            all-zero one, uses ``qr`` coordinates.

    >>> P0, Q0 = torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0], [0.0], [0.0]])
    >>> basis = basis_from_factors(P0, Q0, rank=1, spectrum=torch.ones(1), coordinates="qr")
    >>> basis.P.squeeze().tolist(), basis.Q.abs().squeeze().tolist()
    ([0.6000000238418579, 0.800000011920929], [1.0, 0.0, 0.0])
    """
    for side, factor in (("P", P0), ("Q", Q0)):
        require_finite(factor, f"The raw factor {side}")
    read = diagonals() if coordinates == "fisher" and diagonals is not None else (None, None)
    P, Q = (
        fisher_orthonormal(
            complete_orthonormal(_write_in(X.double(), coordinates), rank, seeded_generator(seed, "complete", side)),
            energy,
        )
        for side, X, energy in zip("PQ", (P0, Q0), read, strict=True)
    )
    num_given = min(P0.shape[1], Q0.shape[1])
    return LayerBasis(P=P.float(), Q=Q.float(), spectrum=spectrum.float(), effective_rank=num_given)


def fisher_orthonormal(
    X: Float[torch.Tensor, "m r"], energy: Float[torch.Tensor, " m"] | None
) -> Float[torch.Tensor, "m r"]:
    """``X (XᵀMX)^-1/2`` in float64, with M the diagonal second moment over its mean; X itself if M is None or zero.

    Directions with less energy than ``LEAST_ENERGY`` are scaled as if they had ``LEAST_ENERGY``.

    >>> a = torch.tensor([4.0, 1.0, 1.0])
    >>> Q = fisher_orthonormal(torch.eye(3)[:, :2], a)
    >>> (Q.mT @ (a[:, None] * Q)).round(decimals=6).tolist()  # mean(a) = 2 times the identity
    [[2.0, 0.0], [0.0, 2.0]]
    """
    if energy is None or not energy.any():
        return X
    X, M = X.double(), energy.double() / energy.double().mean()
    return X @ inverse_root(X.mT @ (M[:, None] * X), LEAST_ENERGY)


def _write_in(X: torch.Tensor, coordinates: Coordinates) -> torch.Tensor:
    if X.shape[1] == 0 or coordinates == "raw":
        return X
    if coordinates == "qr" or coordinates == "fisher":
        return thin_qr(X)[0]
    if coordinates == "scaled_raw":  # scale to the Frobenius norm of an orthonormal factor
        return X * (X.shape[1] ** 0.5 / X.norm())
    assert_never(coordinates)
