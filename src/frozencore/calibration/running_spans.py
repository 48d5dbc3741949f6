"""One layer's spans of several groups of rows, from one group's whitened moment at a time.

See :mod:`frozencore.calibration.group_moments` for the passes and the equations.

Shapes: m outputs, n inputs, r rank, p columns of L and R.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from frozencore.calibration.recorder import Projection
from frozencore.maths.basis import Basis
from frozencore.maths.groups import RunningStack, Share, SharedSpans, merged, shared_spans
from frozencore.maths.linalg import Shape, thin_qr, truncated_svd

NARROWEST, WIDEST = 4, 8  # the least and most columns of L and R, as multiples of the rank
TRIPLES = 2  # singular triples that are kept of a group, as a multiple of the rank
FEWEST_KEPT = 64  # matrices C_k that are held in any case


def span_width(shape: Shape, rank: int, num_groups: int, given: int = 0) -> int:
    """The number p of columns of L and R, if ``given`` directions are in the basis already."""
    m, n = shape
    room = math.isqrt(4 * m * n // num_groups)
    return min(min(m, n) - given, max(NARROWEST * rank, min(WIDEST * rank, room)))


def num_kept(shape: Shape, width: int) -> int:
    """The most matrices C_k that are held, if L and R have ``width`` columns."""
    m, n = shape
    return max(FEWEST_KEPT, 4 * m * n // width**2)


@dataclass
class RunningSpans:
    """One layer: its given spans, the factors L and R on their complement, and what each group has.

    Attributes:
        roots: The diagonals of D^-1/2 and A^-1/2.
        width: The most columns of L and of R.
        L, R: Weighted directions of the groups in passes 1 and 2; orthonormal afterwards.
        cores: The C_k of the groups, each times the root of its weight.
        norms: ‖T_k‖ by group.
        own: The largest share of T_k that a basis of this rank can hold, by group.
        weights: The weight of each group in ``cores``.
        shares: The share of T_k that the spans hold, by group; a group without gradient in this layer is left out.
    """

    roots: tuple[Float[Tensor, "m 1"], Float[Tensor, "n 1"]]
    rank: int
    width: int
    given: tuple[Float[Tensor, "m k"], Float[Tensor, "n k"]]
    L: Float[Tensor, "m p"]
    R: Float[Tensor, "n p"]
    cores: RunningStack
    norms: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)

    @classmethod
    def start(cls, roots: tuple[Tensor, Tensor], rank: int, num_groups: int, beside: Basis | None) -> RunningSpans:
        """Start without a group."""
        L, R = (root[:, :0] for root in roots)
        before = (L, R) if beside is None else (beside.P, beside.Q)
        left, right = (thin_qr(X.to(root) / root)[0] for X, root in zip(before, roots, strict=True))
        shape, num_given = (len(left), len(right)), left.shape[1]
        width = span_width(shape, rank, num_groups, num_given)
        return cls(roots, rank, width, (left, right), L, R, RunningStack(num_kept(shape, num_given + width)))

    def add(self, group: str, G: Float[Tensor, "m n"], weight: float) -> None:
        """Add one group's cross moment; G is overwritten."""
        T = G.mul_(self.roots[0]).mul_(self.roots[1].mT)
        self.norms[group] = norm = float(T.norm())
        if norm == 0:
            return
        svd = truncated_svd(T.div_(norm), TRIPLES * self.rank)
        self.own[group] = float(svd.S[: self.rank].square().sum())
        S = svd.S * math.sqrt(weight)
        new_L, new_R = (X - X0 @ (X0.mT @ X) for X0, X in zip(self.given, (svd.U * S, svd.V * S), strict=True))
        self.L, self.R = merged(self.L, new_L, self.width), merged(self.R, new_R, self.width)

    def within(self) -> Projection:
        """The factors of a pass that sums C_k before it is divided by ‖T_k‖."""
        self.L, self.R = (
            torch.linalg.qr(torch.cat(factors, dim=1)).Q for factors in zip(self.given, (self.L, self.R), strict=True)
        )
        return self.projection(self.L, self.R)

    def projection(self, U: Float[Tensor, "m k"], V: Float[Tensor, "n k"]) -> Projection:
        """The factors of a pass that sums ``UᵀD^-1/2 G_k A^-1/2 V``."""
        return Projection(left=U * self.roots[0], right=V * self.roots[1])

    def add_core(self, group: str, C: Float[Tensor, "p p"], weight: float) -> None:
        """Add one group's C_k; C is overwritten."""
        if group in self.own:
            self.weights[group] = weight
            self.cores.add(C.div_(self.norms[group]).mul_(math.sqrt(weight)))

    def spans(self) -> SharedSpans:
        """U and V of the layer. The shares are known now if the stack still holds each group's matrix."""
        if not self.own:
            nothing = self.L.new_zeros(0)
            return SharedSpans(self.L[:, :0], self.R[:, :0], nothing, nothing, (), nothing)
        C = self.cores.taken().double()
        spans = shared_spans(C, self.rank, self.given[0].shape[1])
        if self.cores.is_whole:
            held = (spans.U.mT @ C @ spans.V).square().sum((1, 2)).tolist()
            for (group, weight), one in zip(self.weights.items(), held, strict=True):
                self._add_share(group, one / weight)
        return spans._replace(U=self.L.double() @ spans.U, V=self.R.double() @ spans.V)

    def add_share(self, group: str, core: Float[Tensor, "r r"]) -> None:
        """Add the share of one group, from what the spans hold of its cross moment."""
        if group in self.own:
            self._add_share(group, float(core.norm() / self.norms[group]) ** 2)

    def energies(self, units: Mapping[str, float]) -> dict[str, float]:
        """``‖T_k‖²`` in units of each group's own mean diagonals."""
        return {group: self.norms[group] ** 2 / units[group] for group in self.own}

    def _add_share(self, group: str, held: float) -> None:
        m, n = (len(root) for root in self.roots)
        self.shares[group] = Share(held, self.own[group], self.rank**2 / (m * n))
