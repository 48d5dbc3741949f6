"""One basis for the updates of many adapters, and a core for each: Tucker-2 of factored matrices.

    max over orthonormal P, Q   Σ_t ‖Pᵀ ΔW_t Q‖² / ‖ΔW_t‖²,    ΔW_t = B_t A_t,    R_t = Pᵀ ΔW_t Q

(JD-Full of Compress-then-Serve, arXiv 2407.00066). Each side is improved in turn while the other stays, so the
objective never falls. No m x n matrix is formed. The result is exact if all updates lie in one span of rank r, and no
direction is added that no update uses.

P and Q are only known up to a rotation of their columns. In the singular directions a core has few large values, which
few bits cannot hold; after a random rotation its values are alike (as QuaRot does with weights, arXiv 2404.00456).

Shapes: m out features, n in features, r rank; B_t m x k_t, A_t k_t x n; Σk is the number of columns of all B_t.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float

from frozencore.device import torch
from frozencore.maths.basis import LayerBasis, known_basis
from frozencore.maths.linalg import complete_orthonormal, require_finite, seeded_generator, thin_qr, truncated_svd

Update = tuple["torch.Tensor", "torch.Tensor"]
"""B (m x k) and A (k x n) of an update B A."""

EXACT_WIDTH = 512
"""Up to this width each side gets its leading singular vectors; above it one power step, which is much faster."""
TOLERANCE, MOST_SWEEPS = 1e-5, 50
"""Sweeps end when one improves the objective by less than this share, or after so many."""
SPAN_TOLERANCE = 1e-6
"""A direction is unused if all cores together have less than this share of their largest singular value there."""
MOST_ADAPTERS, AS_MUCH = 2**20, 1e-4
SEED = 0  # of the rotations, and of directions that fill up the side of the smaller span


def compress(updates: Sequence[Update], rank: int, *, counted: Sequence[bool] | None = None) -> LayerBasis:
    """Find the basis that keeps the most of all updates, each divided by its norm.

    Args:
        updates: B_t and A_t of each update, in one float dtype; the k_t may differ.
        rank: The largest r, at most ``min(m, n)``.
        counted: The updates that the basis is chosen for; by default all.

    Returns:
        Orthonormal P and Q; r is smaller than the given rank if the updates span less, and 0 if all are zero.

    Raises:
        CalibrationError: An update is not finite.
    """
    m, n = updates[0][0].shape[0], updates[0][1].shape[1]
    for B, A in updates:
        require_finite(B)
        require_finite(A)
    chosen = zip(updates, counted or [True] * len(updates), strict=True)
    scaled = [(B / e**0.5, A) for (B, A), counts in chosen if counts and (e := energy(B, A)) > 0]
    if not scaled:
        return known_basis(updates[0][0].new_zeros(m, 0), updates[0][0].new_zeros(n, 0))
    P, Q = _used(*_alternate(scaled, rank), scaled)
    rank = max(P.shape[1], Q.shape[1])
    P = complete_orthonormal(P, rank, seeded_generator(SEED, "compress", "P"))  # a core is square
    Q = complete_orthonormal(Q, rank, seeded_generator(SEED, "compress", "Q"))
    return known_basis(_rotated(P, "P"), _rotated(Q, "Q"))


def core_of(P: Float[torch.Tensor, "m r"], Q: Float[torch.Tensor, "n r"], update: Update) -> Float[torch.Tensor, "r r"]:
    """``Pᵀ B A Q``."""
    B, A = update
    return (P.mT @ B) @ (A @ Q)


def energy(B: Float[torch.Tensor, "m k"], A: Float[torch.Tensor, "k n"]) -> float:
    """``‖B A‖² = tr((BᵀB)(AAᵀ))``, in float64."""
    B, A = B.double(), A.double()
    return max(0.0, float(((B.mT @ B) * (A @ A.mT)).sum()))


def singular_energies(B: Float[torch.Tensor, "m k"], A: Float[torch.Tensor, "k n"]) -> Float[torch.Tensor, " k"]:
    """The squared singular values of ``B A``, largest first, in float64: eigenvalues of ``LᵀAAᵀL`` with LLᵀ = BᵀB."""
    L = _root(B.double())
    A = A.double()
    return torch.linalg.eigvalsh(L.mT @ (A @ A.mT) @ L).clamp_min(0).flip(0)


class CutAlone:
    """The share that one adapter keeps if it is cut alone: directions with the least energy a value are dropped first.

    Args:
        energies: The squared singular values of each layer.
        widths: m + n of each layer, the values that one direction takes.
    """

    def __init__(self, energies: Sequence[Float[torch.Tensor, " _"]], widths: Sequence[int]) -> None:
        values, sizes = torch.cat(list(energies)), torch.cat(
            [torch.full_like(of_layer, width) for of_layer, width in zip(energies, widths, strict=True)]
        )  # fmt: skip
        order = (values / sizes).argsort(descending=True)
        self.num_values = sizes[order].cumsum(0)
        self.shares = values[order].cumsum(0) / values.sum()

    def kept(self, num_values: float) -> float:
        """The share of the update in this many values."""
        fit = int(torch.searchsorted(self.num_values, num_values, right=True))
        return float(self.shares[fit - 1]) if fit else 0.0


def sharing_keeps_more_from(alone: Sequence[CutAlone], kept: float, basis: int, core: float) -> int | None:
    """The number of adapters from which a shared basis keeps more than cutting each adapter alone to the same size.

    Args:
        kept: The share that the shared basis keeps of an adapter, on average, taken to be the same for any number.
        basis, core: The values of the basis and of one core, those of fewer bits by their bytes.

    Returns:
        The number; None if cutting alone keeps more at any.
    """

    def pays(number: int) -> bool:
        return kept + AS_MUCH >= sum(one.kept(basis / number + core) for one in alone) / len(alone)

    if not pays(MOST_ADAPTERS):
        return None
    # a cut keeps less of more adapters, so bisection finds the first number that pays
    low, high = 0, MOST_ADAPTERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _rotated(X: torch.Tensor, side: str) -> torch.Tensor:
    """Other orthonormal columns of the same span, at random."""
    generator = seeded_generator(SEED, "compress", "rotation", side)
    draw = torch.randn(2 * X.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
    return (X.double() @ thin_qr(draw.to(X.device))[0]).to(X.dtype)


def _used(P: torch.Tensor, Q: torch.Tensor, updates: Sequence[Update]) -> list[torch.Tensor]:
    """P and Q without the directions that no core uses."""
    cores = [core_of(P, Q, update) for update in updates]
    used_factors = []
    for X, joined in ((P, torch.cat(cores, dim=1)), (Q, torch.cat([R.mT for R in cores], dim=1))):
        U, S, _ = truncated_svd(joined, len(joined), method="gram")
        used = SPAN_TOLERANCE * S[0] < S
        used_factors.append(X if bool(used.all()) else X @ U[:, used])
    return used_factors


def _alternate(updates: Sequence[Update], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """P and Q; they have fewer than ``rank`` columns if the updates span fewer."""
    sizes = [A.shape[0] for _, A in updates]
    B, A = torch.cat([B for B, _ in updates], dim=1), torch.cat([A.mT for _, A in updates], dim=1)
    # HOSVD: P from [B_t L_t] with L_t L_tᵀ = A_t A_tᵀ, then Q for this P
    whole = torch.cat([one @ _root(other) for one, other in zip(B.split(sizes, 1), A.split(sizes, 1), strict=True)], 1)
    P = truncated_svd(whole, rank).U
    del whole
    B_P = B.mT @ P
    Q = truncated_svd(_images(A, B_P, sizes), rank).U
    A_Q = A.mT @ Q
    objective = _objective(B_P, A_Q, sizes)
    for _ in range(MOST_SWEEPS):
        P = _improved(B, B_P, A_Q, sizes)
        B_P = B.mT @ P
        Q = _improved(A, A_Q, B_P, sizes)
        A_Q = A.mT @ Q
        before, objective = objective, _objective(B_P, A_Q, sizes)
        if objective - before <= TOLERANCE * objective:
            break
    return P, Q


def _images(F: torch.Tensor, projected: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """``[F_t Z_t]`` with Z_t (k_t x r) the other factor of update t on its basis; a root of Z_t Z_tᵀ if it is smaller.

    The leading left singular vectors of this matrix are the best basis on this side.
    """
    blocks = zip(F.split(sizes, 1), projected.split(sizes, 0), strict=True)
    return torch.cat([one @ (Z if Z.shape[1] <= Z.shape[0] else _root(Z.mT)) for one, Z in blocks], dim=1)


def _root(X: Float[torch.Tensor, "d k"]) -> Float[torch.Tensor, "k k"]:
    """L with ``L Lᵀ = XᵀX``."""
    values, vectors = torch.linalg.eigh(X.double().mT @ X.double())
    return (vectors * values.clamp_min(0).sqrt()).to(X.dtype)


def _improved(F: torch.Tensor, F_X: torch.Tensor, Z: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """An orthonormal basis for which ``‖XᵀM‖`` is not smaller, M = [F_t Z_t]: the best one, or a power step from X.

    The step is ``M (MᵀX) = Σ_t F_t Z_t Z_tᵀ (F_tᵀX)``: a product with F, without M.
    """
    rank = Z.shape[1]
    if min(len(F), sum(min(size, rank) for size in sizes)) <= EXACT_WIDTH:
        return truncated_svd(_images(F, Z, sizes), rank, method="gram").U
    seen = torch.cat([one @ (one.mT @ X) for one, X in zip(Z.split(sizes), F_X.split(sizes), strict=True)])
    return thin_qr(F @ seen)[0]


def _objective(left: torch.Tensor, right: torch.Tensor, sizes: Sequence[int]) -> float:
    blocks = zip(left.split(sizes), right.split(sizes), strict=True)
    return sum(float((one.mT @ other).double().square().sum()) for one, other in blocks)
