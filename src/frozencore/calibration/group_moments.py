"""Reduce the moments of several groups of rows, group by group, to the spans for one common basis.

    pass 1:  a_k, d_k of every group                           the pooled diagonals A and D
    pass 2:  T_k = D^-1/2 G_k A^-1/2 / ‖·‖, one at a time      spans L (m x p), R (n x p) of all groups' leading triples
    pass 3:  C_k = Lᵀ T_k R (p x p) of every group             U and V within these spans

There are three passes, because T_k needs the diagonals of all groups, and because the factors of thousands of groups
would be larger than the sums. Memory holds one m x n matrix a layer, for the current group, and K p² numbers.
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
from frozencore.calibration.collect import collect_moments, run_pass, share_of
from frozencore.calibration.preserve import preserved
from frozencore.calibration.recorder import Projection
from frozencore.calibration.taps import Taps
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.groups import Share, SharedSpans, merged, pooled_diagonals, shared_spans
from frozencore.maths.linalg import Shape, thin_qr, truncated_svd
from frozencore.maths.moments import CROSS, DIAGONALS, LayerMoments
from frozencore.maths.whitening import Whitening
from frozencore.words import Progress

NARROWEST, WIDEST = 4, 8  # the least and most columns of L and R, as multiples of the rank
TRIPLES = 2  # singular triples that are kept of a group, as a multiple of the rank


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
        norms: ‖T_k‖ by group.
        own: The largest share of T_k that a basis of this rank can hold, by group.
    """

    roots: tuple[Float[Tensor, "m 1"], Float[Tensor, "n 1"]]
    rank: int
    width: int
    given: tuple[Float[Tensor, "m k"], Float[Tensor, "n k"]]
    L: Float[Tensor, "m p"]
    R: Float[Tensor, "n p"]
    norms: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, roots: tuple[Tensor, Tensor], rank: int, num_groups: int, beside: Basis | None) -> _Running:
        """Start without a group."""
        L, R = (root[:, :0] for root in roots)
        before = (L, R) if beside is None else (beside.P, beside.Q)
        left, right = (thin_qr(X.to(root) / root)[0] for X, root in zip(before, roots, strict=True))
        width = span_width((len(left), len(right)), rank, num_groups, left.shape[1])
        return cls(roots, rank, width, (left, right), L, R)

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


def span_width(shape: Shape, rank: int, num_groups: int, given: int = 0) -> int:
    """The number p of columns of L and R, if ``given`` directions are in the basis already."""
    m, n = shape
    room = math.isqrt(4 * m * n // num_groups)
    return min(min(m, n) - given, max(NARROWEST * rank, min(WIDEST * rank, room)))


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
        groups: The batches of each group; they are read three times.
        ranks: The rank of each layer's basis.
        whitening: A diagonal metric.
        weights: The weight w_k of each group; their mean is 1.
        beside: The bases that are widened to these ranks, by layer; their spans come first.

    Raises:
        CalibrationError: As in :func:`frozencore.calibration.collect.collect_moments`; the message names the group.
    """
    num_passes = 3 * len(groups)
    diagonals = _pooled(model, groups, layers, options, weights, progress, num_passes)
    roots = {name: whitening.diagonal_roots(own, (len(own.d), len(own.a)), own.d) for name, own in diagonals.items()}
    running = {
        name: _Running.start(roots[name], ranks[name], len(groups), None if beside is None else beside[name])
        for name in layers
    }
    for number, (group, batches) in enumerate(groups.items(), start=len(groups)):
        with _named(group):
            moments = collect_moments(
                model, batches, layers, needs=CROSS, options=options, progress=share_of(progress, number, num_passes)
            )
            for name in layers:
                running[name].add(group, moments.pop(name).G, weights[group])
    projections = {}
    for name, found in running.items():
        L, R = (
            torch.linalg.qr(torch.cat(factors, dim=1)).Q
            for factors in zip(found.given, (found.L, found.R), strict=True)
        )
        projections[name] = Projection(left=L.mul_(roots[name][0]), right=R.mul_(roots[name][1]))
    cores: dict[str, list[Tensor]] = {name: [] for name in layers}
    for number, (group, batches) in enumerate(groups.items(), start=2 * len(groups)):
        with _named(group), preserved(model):
            taps = Taps(layers, CROSS, options, projections)
            for name, recorder in run_pass(model, batches, taps, share_of(progress, number, num_passes)).items():
                norm = running[name].norms[group]
                mean = recorder.totals["cross"] / recorder.num_tokens
                cores[name].append(mean / norm if norm else torch.zeros_like(mean))
    result = {}
    for name in layers:
        L, R = (factor / root for factor, root in zip(vars(projections.pop(name)).values(), roots[name], strict=True))
        spans, shares = _spans(running[name], L, R, torch.stack(cores.pop(name)), list(weights.values()))
        result[name] = GroupedLayer(diagonals[name], spans, shares)
    return result


def _pooled(
    model: nn.Module,
    groups: Mapping[str, Sequence[Batch]],
    layers: Mapping[str, nn.Module],
    options: CalibrationOptions,
    weights: Mapping[str, float],
    progress: Progress | None,
    num_passes: int,
) -> dict[str, LayerMoments]:
    found: dict[str, list[LayerMoments]] = {name: [] for name in layers}
    for number, (group, batches) in enumerate(groups.items()):
        with _named(group):
            moments = collect_moments(
                model, batches, layers, needs=DIAGONALS, options=options,
                progress=share_of(progress, number, num_passes),
            )  # fmt: skip
        for name in layers:
            found[name].append(moments[name])
    return {name: pooled_diagonals(own, list(weights.values())) for name, own in found.items()}


def _spans(
    running: _Running,
    L: Float[Tensor, "m p"],
    R: Float[Tensor, "n p"],
    C: Float[Tensor, "K p p"],
    weights: Sequence[float],
) -> tuple[SharedSpans, dict[str, Share]]:
    """U and V of the layer, and the share that they hold of each group with a gradient in this layer."""
    if not running.own:
        nothing = L.new_zeros(0)
        return SharedSpans(L[:, :0], R[:, :0], nothing, nothing, ()), {}
    rank, C = running.rank, C.double()
    spans = shared_spans(C * C.new_tensor(weights).sqrt()[:, None, None], rank, running.given[0].shape[1])
    held = (spans.U.mT @ C @ spans.V).square().sum((1, 2)).tolist()
    random = rank * rank / (len(L) * len(R))
    shares = {
        group: Share(share, running.own[group], random)
        for group, share in zip(running.norms, held, strict=True)
        if group in running.own
    }
    return spans._replace(U=L.double() @ spans.U, V=R.double() @ spans.V), shares


@contextmanager
def _named(group: str) -> Iterator[None]:
    """Add the group's name to errors raised inside."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"Group {group!r}: {error}") from error
