"""The share of a layer's moments that a basis captures before any training (paper, sections 3.1 and 3.2).

    T = D^-1/2 G A^-1/2,   C = (PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2,   J = ‖C‖²_F ≤ ‖T‖²_F

J depends on the spans only, and no basis of rank r exceeds ``Σ_{i≤r} σ_i(T)²``, which FCCA reaches.

Letters: G (m x n) cross moment, A (n) and D (m) diagonals of the damped second moments, P (m x r) and Q (n x r) a
basis, C r x r.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float

from frozencore.device import torch, without_autocast
from frozencore.errors import CalibrationError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.linalg import effective_rank
from frozencore.maths.moments import LayerMoments, MomentName, max_over_median
from frozencore.maths.whitening import Whitening, damped


def core_gradient(G: Float[torch.Tensor, "m n"], basis: LayerBasis) -> Float[torch.Tensor, "r r"]:
    """``PᵀGQ``, the gradient of a zero core, in float64; the product with G is in the dtype of G."""
    return (basis.P.to(G.dtype).mT @ G).double() @ basis.Q.double()


def whitened_core(
    core: Float[torch.Tensor, "r r"], A: Float[torch.Tensor, " n"], D: Float[torch.Tensor, " m"], basis: LayerBasis
) -> Float[torch.Tensor, "r r"]:
    """``(PᵀDP)^-1/2 C (QᵀAQ)^-1/2`` of a core's gradient C, up to a rotation on each side (Cholesky roots)."""
    P, Q = basis.P.double(), basis.Q.double()
    left = torch.linalg.cholesky(P.mT @ (D.double()[:, None] * P))
    right = torch.linalg.cholesky(Q.mT @ (A.double()[:, None] * Q))
    half = torch.linalg.solve_triangular(left, core, upper=False)
    return torch.linalg.solve_triangular(right, half.mT, upper=False).mT


METRIC = Whitening()
"""Both sides, diagonal, default damping: the same metric for every constructor, so that bases can be compared."""
BLOCK_VALUES = 2**16  # of G at a time, so that they stay in the CPU's cache
CAPTURE_NEEDS: frozenset[MomentName] = METRIC.needs() | {"cross"}


@dataclass(frozen=True)
class Capture:
    """The share of one layer's moments that a basis captures.

    Attributes:
        gradient, gradient_total: The gradient inside the spans, ``‖PᵀGQ‖_F`` for orthonormal P and Q, and ``‖G‖_F``.
        values: Singular values of C, largest first; for FCCA in this metric they equal T's.
        energy: ``‖T‖²_F``, the upper limit of J.
        input_spread, error_spread: Maximum over median of a and of d.
    """

    gradient: float
    gradient_total: float
    values: tuple[float, ...]
    energy: float
    input_spread: float
    error_spread: float

    @property
    def J(self) -> float:
        """The squared whitened gradient inside the spans: ``Σ σ_i(C)²``."""
        return sum(value**2 for value in self.values)

    @property
    def effective_rank(self) -> int:
        """The number of directions of C above rounding."""
        return effective_rank(torch.tensor(self.values, dtype=torch.float64))

    @property
    def participation(self) -> float:
        """``(Σσ²)² / Σσ⁴``: the number of directions over which J is spread, from 1 to r; 0 without a gradient."""
        fourth = sum(value**4 for value in self.values)
        return self.J**2 / fourth if fourth else 0.0


def measure_capture(moments: LayerMoments, basis: LayerBasis, metric: Whitening = METRIC) -> Capture:
    """Measure a basis in the diagonal metric with the damping of ``metric``.

    Raises:
        CalibrationError: A moment is missing or not finite.
        torch.linalg.LinAlgError: The columns of P or Q depend on one another.

    >>> moments = LayerMoments(1, cross=torch.diag(torch.tensor([2.0, 1.0])), input_square=torch.ones(2),
    ...                        error_square=torch.ones(2))
    >>> found = measure_capture(moments, LayerBasis(torch.eye(2)[:, :1], torch.eye(2)[:, :1], torch.ones(1), 1))
    >>> round(found.gradient**2 / found.gradient_total**2, 6)
    0.8
    """
    G, count = moments.total("cross"), moments.num_tokens
    spreads = max_over_median(moments.a), max_over_median(moments.d)
    largest = float(torch.stack(torch.aminmax(G)).abs().max())
    if largest == 0:
        return Capture(0.0, 0.0, (0.0,) * basis.rank, 0.0, *spreads)
    A, D = (damped(moment, c) for moment, c in zip((moments.a, moments.d), metric.damping_by_side, strict=True))
    basis = replace(basis, P=basis.P.to(G.device), Q=basis.Q.to(G.device))
    core = core_gradient(G, basis) / count
    square, energy = _squares(G, A, D, largest)
    return Capture(
        gradient=float(whitened_core(core, torch.ones_like(A), torch.ones_like(D), basis).norm()),
        gradient_total=largest * square**0.5 / count,
        values=tuple(torch.linalg.svdvals(whitened_core(core, A, D, basis)).tolist()),
        energy=energy * (largest / count) ** 2,
        input_spread=spreads[0],
        error_spread=spreads[1],
    )


@without_autocast()
def capture_or_none(moments: LayerMoments | None, basis: LayerBasis) -> Capture | None:
    """Run :func:`measure_capture`; return None if a moment is missing or unusable."""
    if moments is None or not set(moments.names()) >= CAPTURE_NEEDS:
        return None
    try:
        return measure_capture(moments, basis)
    except (CalibrationError, torch.linalg.LinAlgError):
        return None


def _squares(
    G: Float[torch.Tensor, "m n"], A: Float[torch.Tensor, " n"], D: Float[torch.Tensor, " m"], unit: float
) -> tuple[float, float]:
    """``‖G‖²_F`` and ``‖D^-1/2 G A^-1/2‖²_F``, both divided by ``unit²`` to stay in float32's range.

    G is read in blocks of rows, to save memory.
    """
    least = A.min()
    weights = torch.stack([torch.ones_like(A), least / A], dim=1).to(G.dtype)
    blocks = G.split(max(1, BLOCK_VALUES // G.shape[1]))
    by_row = torch.cat([(rows / unit).square_() @ weights for rows in blocks]).double()
    return float(by_row[:, 0].sum()), float(by_row[:, 1] @ D.reciprocal() / least)
