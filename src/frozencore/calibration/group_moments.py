"""Reduce the moments of several groups of rows, group by group, to the spans for one common basis.

    pass 1:  a_k, d_k of every group                           the pooled diagonals A and D
    pass 2:  T_k = D^-1/2 G_k A^-1/2 / ‖·‖, one at a time      spans L (m x p), R (n x p) of all groups' leading triples
    pass 3:  C_k = Lᵀ T_k R (p x p) of every group             U and V within these spans

There are three passes, because T_k needs the diagonals of all groups, and because the factors of thousands of groups
would be larger than the sums. Memory holds one m x n matrix a layer, for the current group, and at most 4 m n numbers
of the C_k (or 64 of them). If there are more groups, fewer matrices replace the C_k (:class:`RunningStack`), and a
fourth pass finds the share of each group. So no tensor grows with K.
Test: 4 and 16 random groups with slowly falling spectra (160 x 128, σᵢ = i^-0.3 to i^-1, r = 4). U and V within these
spans held .99 to 1.00 of the energy that they hold with all T_k at once; .97 to 1.00 with p = 4r. Groups that share
little lose more.

A basis that grows keeps its spans: U₀ and V₀ span D^1/2 P and A^1/2 Q in the metric of the new rows. L and R are then
the leading directions of all groups on the complement of U₀ and V₀. In the new basis U₀ and V₀ come first.

Shapes: K groups, m outputs, n inputs, r rank, p = 8r, or less where K p² would exceed 4 m n, but 4r at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from frozencore.calibration.batches import Batch
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import refuse_unreached, run_pass, share_of
from frozencore.calibration.preserve import preserved
from frozencore.calibration.recorder import Projection
from frozencore.calibration.taps import Taps
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.groups import PooledDiagonals, RunningStack, Share, SharedSpans, merged, shared_spans
from frozencore.maths.linalg import Shape, thin_qr, truncated_svd
from frozencore.maths.moments import CROSS, DIAGONALS, LayerMoments, MomentName
from frozencore.maths.whitening import Whitening
from frozencore.words import Progress

NARROWEST, WIDEST = 4, 8  # the least and most columns of L and R, as multiples of the rank
TRIPLES = 2  # singular triples that are kept of a group, as a multiple of the rank
FEWEST_KEPT = 64  # matrices C_k that are held in any case


@dataclass(frozen=True)
class GroupedLayer:
    """The result for one layer.

    Attributes:
        diagonals: The pooled a and d; no matrix.
        shares: The share of T_k that the spans hold, by group; a group without gradient in this layer is left out.
    """

    diagonals: LayerMoments
    spans: SharedSpans
    shares: dict[str, Share]


@dataclass
class _Running:
    """One layer: its given spans, the factors L and R on their complement, and what each group has.

    Attributes:
        roots: The diagonals of D^-1/2 and A^-1/2.
        width: The most columns of L and of R.
        cores: The C_k of the groups, each times the root of its weight.
        norms: ‖T_k‖ by group.
        own: The largest share of T_k that a basis of this rank can hold, by group.
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

    @classmethod
    def start(cls, roots: tuple[Tensor, Tensor], rank: int, num_groups: int, beside: Basis | None) -> _Running:
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

    def projection(self) -> Projection:
        """The factors of a pass that sums C_k before it is divided by ‖T_k‖."""
        L, R = (
            torch.linalg.qr(torch.cat(factors, dim=1)).Q for factors in zip(self.given, (self.L, self.R), strict=True)
        )
        return Projection(left=L.mul_(self.roots[0]), right=R.mul_(self.roots[1]))

    def add_core(self, group: str, C: Float[Tensor, "p p"], weight: float) -> None:
        """Add one group's C_k; C is overwritten."""
        if group in self.own:
            self.cores.add(C.div_(self.norms[group]).mul_(math.sqrt(weight)))

    def result(self, within: Projection, diagonals: LayerMoments, weights: Mapping[str, float]) -> GroupedLayer:
        """U and V of the layer, and the share of each group if the stack still holds each group's matrix."""
        L, R = (factor / root for factor, root in zip(vars(within).values(), self.roots, strict=True))
        if not self.own:
            nothing = L.new_zeros(0)
            return GroupedLayer(diagonals, SharedSpans(L[:, :0], R[:, :0], nothing, nothing, ()), {})
        C = self.cores.taken().double()
        spans = shared_spans(C, self.rank, self.given[0].shape[1])
        shares = {}
        if self.cores.is_whole:
            held = (spans.U.mT @ C @ spans.V).square().sum((1, 2)).tolist()
            found = zip(self.own, held, strict=True)
            shares = {group: self._share(group, weighted / weights[group]) for group, weighted in found}
        spans = spans._replace(U=L.double() @ spans.U, V=R.double() @ spans.V)
        return GroupedLayer(diagonals, spans, shares)

    def held(self, spans: SharedSpans) -> Projection:
        """The factors of a pass that sums what the spans hold of each group."""
        return Projection(left=spans.U * self.roots[0], right=spans.V * self.roots[1])

    def share(self, group: str, core: Float[Tensor, "r r"]) -> Share:
        """The share of one group, from what the spans hold of its cross moment."""
        return self._share(group, float(core.norm() / self.norms[group]) ** 2)

    def _share(self, group: str, held: float) -> Share:
        m, n = (len(root) for root in self.roots)
        return Share(held, self.own[group], self.rank**2 / (m * n))


def span_width(shape: Shape, rank: int, num_groups: int, given: int = 0) -> int:
    """The number p of columns of L and R, if ``given`` directions are in the basis already."""
    m, n = shape
    room = math.isqrt(4 * m * n // num_groups)
    return min(min(m, n) - given, max(NARROWEST * rank, min(WIDEST * rank, room)))


def num_kept(shape: Shape, width: int) -> int:
    """The most matrices C_k that are held, if L and R have ``width`` columns."""
    m, n = shape
    return max(FEWEST_KEPT, 4 * m * n // width**2)


def collect_groups(
    model: nn.Module,
    groups: Mapping[str, Sequence[Batch]],
    layers: Mapping[str, nn.Module],
    ranks: Mapping[str, int],
    *,
    whitening: Whitening,
    options: CalibrationOptions,
    weights: Mapping[str, float],
    beside: Mapping[str, Basis] | None = None,
    progress: Progress | None = None,
) -> dict[str, GroupedLayer]:
    """Find the spans of one basis for all groups, by layer.

    Args:
        groups: The batches of each group; they are read three or four times.
        ranks: The rank of each layer's basis.
        whitening: A diagonal metric.
        weights: The weight w_k of each group; their mean is 1.
        beside: The bases that are widened to these ranks, by layer; their spans come first.

    Raises:
        CalibrationError: As in :func:`frozencore.calibration.collect.collect_moments`; the message names the group.
    """
    passes = _Passes(model, groups, options, progress)
    pooled = {name: PooledDiagonals() for name in layers}
    for group, moments in passes.read(layers, DIAGONALS):
        with _named(group):
            for name, own in moments.items():
                pooled[name].add(own, weights[group])
    diagonals = {name: own.moments() for name, own in pooled.items()}
    running = {}
    for name, own in diagonals.items():
        roots = whitening.diagonal_roots(own, (len(own.d), len(own.a)), own.d)
        running[name] = _Running.start(roots, ranks[name], len(groups), None if beside is None else beside[name])
    for group, moments in passes.read(layers, CROSS):
        for name in layers:
            running[name].add(group, moments.pop(name).G, weights[group])
    projections = {name: found.projection() for name, found in running.items()}
    for group, moments in passes.read(layers, CROSS, projections):
        for name in layers:
            running[name].add_core(group, moments.pop(name).G, weights[group])
    result = {name: found.result(projections.pop(name), diagonals[name], weights) for name, found in running.items()}
    left_out = {name: layers[name] for name, found in running.items() if not found.cores.is_whole}
    if left_out:  # the stacks do not hold each group's own matrix
        passes.num_passes = 4
        projections = {name: running[name].held(result[name].spans) for name in left_out}
        for group, moments in passes.read(left_out, CROSS, projections):
            for name in left_out:
                if group in running[name].own:
                    result[name].shares[group] = running[name].share(group, moments.pop(name).G)
    return result


@dataclass
class _Passes:
    """Passes over the rows of all groups.

    Attributes:
        num_passes: The number of passes that are planned.
        num_read: The number of groups that were read, over all passes.
    """

    model: nn.Module
    groups: Mapping[str, Sequence[Batch]]
    options: CalibrationOptions
    progress: Progress | None
    num_passes: int = 3
    num_read: int = 0

    def read(
        self,
        layers: Mapping[str, nn.Module],
        needs: frozenset[MomentName],
        projections: Mapping[str, Projection] | None = None,
    ) -> Iterator[tuple[str, dict[str, LayerMoments]]]:
        """Yield each group's name and its moments by layer."""
        for group, batches in self.groups.items():
            progress = share_of(self.progress, self.num_read, self.num_passes * len(self.groups))
            taps = Taps(layers, needs, self.options, projections or {})
            with _named(group), preserved(self.model):
                recorders = run_pass(self.model, batches, taps, progress)
                moments = {name: recorder.moments() for name, recorder in recorders.items()}
                refuse_unreached({name: own.num_tokens for name, own in moments.items()})
            self.num_read += 1
            del recorders
            yield group, moments


@contextmanager
def _named(group: str) -> Iterator[None]:
    """Add the group's name to errors raised inside."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"Group {group!r}: {error}") from error
