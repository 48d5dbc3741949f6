"""One basis for groups of rows (tenants, tasks) that want different updates (not in the paper; docs/maths.md).

    T_k = D^-1/2 G_k A^-1/2 / ‖·‖_F,   maximise over orthonormal U, V   Σ_k w_k ‖Uᵀ T_k V‖²_F

This is the Tucker-2 decomposition of the stack of the T_k. For a fixed V the best U holds the leading eigenvectors of
``Σ_k w_k T_k V Vᵀ T_kᵀ``, and the same holds for V. The two eigenproblems alternate from the HOSVD start, the leading
eigenvectors of ``Σ_k w_k T_k T_kᵀ`` and ``Σ_k w_k T_kᵀ T_k``; no step lowers the sum.

D and A are the diagonals d_k and a_k, each divided by its mean, averaged over the groups with the weights w_k. So
neither the scale of a group's loss nor its number of rows changes its weight, and a group of weight 2 counts as the
same group twice.

A basis that grows keeps the spans that it has: U = [U₀, U₁] with U₀ given, and V alike. For a fixed V the best U₁ holds
the leading eigenvectors of the same matrix, projected on the complement of U₀.

Shapes: K groups, m outputs, n inputs, r rank, p and q columns of a running factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from jaxtyping import Float

from frozencore.maths.linalg import canonical_signs, require_finite
from frozencore.maths.moments import DIAGONALS, LayerMoments, MomentName
from frozencore.torch_later import torch

MOST_ROUNDS = 200
LEAST_GAIN = 1e-9  # relative to the sum: a round with a smaller gain is the last


class SharedSpans(NamedTuple):
    """The spans that hold most of all groups' moments, most important direction first.

    Attributes:
        left_energy, right_energy: The part of the sum in each direction of U and of V, r numbers each.
        sums: ``Σ_k w_k ‖UᵀT_kV‖²`` at the start and after each round.
        gains: The part of the sum that each further direction of both sides adds, r numbers: their first k add up to
            the sum with the first k columns of U and of V.
    """

    U: Float[torch.Tensor, "p r"]
    V: Float[torch.Tensor, "q r"]
    left_energy: Float[torch.Tensor, " r"]
    right_energy: Float[torch.Tensor, " r"]
    sums: tuple[float, ...]
    gains: Float[torch.Tensor, " r"]


@dataclass(frozen=True)
class Share:
    """The share of ``‖T‖²_F`` that a basis holds, from 0 to 1.

    By theorem 1 it is the share of the gain of a full-rank update, as the moments predict it.

    Attributes:
        own: The largest share that any basis of the same rank holds.
        random: The mean share of random bases of that rank, r²/(mn).
    """

    held: float
    own: float
    random: float

    @property
    def of_own(self) -> float:
        """The basis's share over the largest share possible at its rank."""
        return self.held / self.own if self.own else 0.0

    @property
    def way(self) -> float:
        """The place of the basis between a random basis, 0, and the best one of its rank, 1."""
        room = self.own - self.random
        return (self.held - self.random) / room if room > 0 else 1.0


def mean_share(shares: Iterable[Share]) -> Share:
    """Average each number over layers or groups."""
    parts = zip(*((share.held, share.own, share.random) for share in shares), strict=True)
    return Share(*map(fmean, parts))


def shared_spans(T: Float[torch.Tensor, "K p q"], rank: int, given: int = 0) -> SharedSpans:
    """Find U and V for the stacked matrices ``√w_k T_k``, in float64.

    The sum has several local maxima. The ascent runs from the HOSVD's V and from its U; the better result is taken.

    Args:
        given: So many first coordinates, on both sides, are the first directions of U and of V.

    Raises:
        CalibrationError: A matrix is not finite.
    """
    require_finite(T)
    T = T.double()
    rank = min(rank, *T.shape[1:])
    U, V = (_leading(_gram(M), rank, given)[0] for M in (T, T.mT))
    start = float((U.mT @ T @ V).square().sum())
    (U, V, sums), (V_too, U_too, others) = _ascended(T, V, given, start), _ascended(T.mT, U, given, start)
    if others[-1] > sums[-1]:
        U, V, sums = U_too, V_too, others
    core = U.mT @ T @ V
    left_turn, left = _leading(_gram(core), rank, given)
    right_turn, right = _leading(_gram(core.mT), rank, given)
    U, V = U @ left_turn, V @ right_turn  # sorted by energy, behind the given directions
    squares = (left_turn.mT @ core @ right_turn).square().sum(0)
    gains = squares.tril().sum(1) + squares.triu(1).sum(0)  # the entries of each further row and column
    U, V = canonical_signs(U, left, U)[0], canonical_signs(V, right, V)[0]
    return SharedSpans(U, V, left, right, tuple(sums), gains)


def _ascended(
    T: Float[torch.Tensor, "K p q"], V: Float[torch.Tensor, "q r"], given: int, start: float
) -> tuple[Float[torch.Tensor, "p r"], Float[torch.Tensor, "q r"], list[float]]:
    """Find the best U for V, the best V for U, and so on, until the sum stops rising."""
    rank, sums = V.shape[1], [start]
    while True:
        U, _ = _leading(_gram(T @ V), rank, given)
        V, energy = _leading(_gram(T.mT @ U), rank, given)
        sums.append(float(energy.sum()))
        if len(sums) > MOST_ROUNDS or sums[-1] - sums[-2] <= LEAST_GAIN * sums[-1]:
            return U, V, sums


def merged(
    factor: Float[torch.Tensor, "m p"], new: Float[torch.Tensor, "m q"], width: int
) -> Float[torch.Tensor, "m width"]:
    """Find a factor L of at most ``width`` columns whose ``L Lᵀ`` best approximates the sum of both factors' products.

    Repeated calls reduce a stream of matrices to the leading left singular directions of all of them.
    """
    both = torch.cat([factor, new], dim=1)
    _, W = torch.linalg.eigh((both.mT @ both).double())
    return both @ W[:, -width:].flip(1).to(both.dtype)


@dataclass
class RunningStack:
    """Matrices M_k (p x q) of any number of groups, held as at most ``most`` matrices.

    ``Σ_k ‖UᵀM_kV‖²`` depends on the matrices through ``Σ_k vec(M_k) vec(M_k)ᵀ`` alone. If more than ``most`` matrices
    come, they are replaced by ``most / 2`` matrices with the leading part of that sum.

    Attributes:
        is_whole: Whether the matrices are still those that came.
    """

    most: int
    is_whole: bool = True
    _held: list[Float[torch.Tensor, "p q"]] = field(default_factory=list)

    def add(self, M: Float[torch.Tensor, "p q"]) -> None:
        """Add one group's matrix."""
        self._held.append(M)
        if len(self._held) > self.most:
            self.is_whole = False
            columns = self.taken().flatten(1).mT
            fewer = merged(columns[:, :0], columns, self.most // 2)
            self._held = list(fewer.mT.unflatten(1, M.shape))

    def taken(self) -> Float[torch.Tensor, "k p q"]:
        """Hand over the matrices; the stack is empty afterwards."""
        held, self._held = torch.stack(self._held), []
        return held


@dataclass
class PooledDiagonals:
    """The running mean of the groups' a and d of one layer, each divided by its own mean.

    A group whose moment is all zero (no gradient reached the layer) is left out.
    """

    num_tokens: int = 0
    _dtype: torch.dtype | None = None
    _sums: dict[MomentName, torch.Tensor] = field(default_factory=dict)
    _weights: dict[MomentName, float] = field(default_factory=dict)

    def add(self, group: LayerMoments, weight: float) -> None:
        """Add the diagonals of one group.

        Raises:
            CalibrationError: The group has no counted token, or a moment is not finite.
        """
        self.num_tokens += group.num_tokens
        for name in DIAGONALS:
            moment = group.mean(name)
            self._dtype = moment.dtype
            total = self._sums.setdefault(name, torch.zeros_like(moment, dtype=torch.float64))
            if moment.any():
                total += weight * (moment.double() / moment.double().mean())
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def moments(self) -> LayerMoments:
        """The pooled diagonals as sums over the tokens of all groups; no matrices."""
        sums = {name: total / self._weights.get(name, 1.0) * self.num_tokens for name, total in self._sums.items()}
        return LayerMoments(self.num_tokens, **{name: total.to(self._dtype) for name, total in sums.items()})


def _gram(T: Float[torch.Tensor, "K p q"]) -> Float[torch.Tensor, "p p"]:
    """``Σ_k T_k T_kᵀ``."""
    return torch.einsum("kpq,krq->pr", T, T)


def _leading(
    M: Float[torch.Tensor, "p p"], rank: int, given: int
) -> tuple[Float[torch.Tensor, "p r"], Float[torch.Tensor, " r"]]:
    """The given first directions, then the leading eigenvectors of a PSD matrix on the complement, largest first.

    Returns:
        The directions, with canonical signs, and what each holds: its Rayleigh quotient.
    """
    values, vectors = torch.linalg.eigh(M[given:, given:])
    num_new = rank - given
    top, values = vectors[:, len(values) - num_new :].flip(1), values[len(values) - num_new :].flip(0).clamp_min(0)
    U = torch.block_diag(torch.eye(given, dtype=M.dtype, device=M.device), canonical_signs(top, values, top)[0])
    return U, torch.cat([M.diagonal()[:given], values])
