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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from frozencore.calibration.batches import Batch
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import refuse_unreached, run_pass, share_of
from frozencore.calibration.layer_owners import reduce_moments, sent_by
from frozencore.calibration.preserve import preserved
from frozencore.calibration.recorder import Projection
from frozencore.calibration.running_spans import RunningSpans
from frozencore.calibration.taps import Taps
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.groups import PooledDiagonals, Share, SharedSpans
from frozencore.maths.moments import CROSS, DIAGONALS, LayerMoments, MomentName
from frozencore.maths.whitening import Whitening
from frozencore.ranks import all_ranks_or_none, gathered, own_rank
from frozencore.words import Progress


@dataclass(frozen=True)
class GroupedLayer:
    """The result for one layer.

    Attributes:
        diagonals: The pooled a and d; no matrix.
        spans: None on ranks that do not own the layer.
        shares: The share of T_k that the spans hold, by group; a group without gradient in this layer is left out.
        energies: ``‖D^-1/2 G_k A^-1/2‖²`` by group, in units of the group's own mean diagonals.
    """

    diagonals: LayerMoments
    spans: SharedSpans | None
    shares: dict[str, Share]
    energies: dict[str, float]


def collect_groups(
    model: nn.Module,
    groups: Mapping[str, Sequence[Batch]],
    layers: Mapping[str, nn.Module],
    ranks: Mapping[str, int],
    *,
    whitening: Whitening,
    options: CalibrationOptions,
    weights: Mapping[str, float],
    owners: Mapping[str, int] | None = None,
    beside: Mapping[str, Basis] | None = None,
    progress: Progress | None = None,
) -> dict[str, GroupedLayer]:
    """Find the spans of one basis for all groups, by layer. Each rank has its own rows of every group.

    Args:
        groups: The batches of each group; they are read three or four times.
        ranks: The rank of each layer's basis.
        whitening: A diagonal metric.
        weights: The weight w_k of each group; their mean is 1.
        owners: The rank that finds each layer's spans; by default there is one rank.
        beside: The bases that are widened to these ranks, by layer; their spans come first.

    Raises:
        CalibrationError: As in :func:`frozencore.calibration.collect.collect_moments`; the message names the group.
    """
    owners = owners or dict.fromkeys(layers, 0)
    mine = [name for name in layers if owners[name] == own_rank()]
    passes = _Passes(model, groups, options, owners, progress)
    pooled = {name: PooledDiagonals() for name in layers}
    units: dict[str, dict[str, float]] = {name: {} for name in layers}
    for group, moments in passes.read(layers, DIAGONALS):
        with _of_group(group):
            for name, own in moments.items():
                pooled[name].add(own, weights[group])
                units[name][group] = whitening.unit(own)
    diagonals = {name: own.moments() for name, own in pooled.items()}
    roots = {name: whitening.diagonal_roots(own, (len(own.d), len(own.a)), own.d) for name, own in diagonals.items()}
    running = {
        name: RunningSpans.start(roots[name], ranks[name], len(groups), None if beside is None else beside[name])
        for name in mine
    }
    for group, moments in passes.read(layers, CROSS):
        with _of_group(group):
            for name in mine:
                running[name].add(group, moments.pop(name).G, weights[group])
    for group, moments in passes.read(layers, CROSS, {name: found.within() for name, found in running.items()}):
        with _of_group(group):
            for name in mine:
                running[name].add_core(group, moments.pop(name).G, weights[group])
    with all_ranks_or_none():
        spans = {name: found.spans() for name, found in running.items()}
    left_out = gathered({name: True for name, found in running.items() if not found.cores.is_whole})
    if left_out:  # the stacks do not hold each group's own matrix
        passes.num_passes = 4
        factors = {name: running[name].projection(*spans[name][:2]) for name in mine if name in left_out}
        for group, moments in passes.read({name: layers[name] for name in layers if name in left_out}, CROSS, factors):
            for name in factors:
                running[name].add_share(group, moments.pop(name).G)
    return {
        name: GroupedLayer(diagonals[name], spans[name], running[name].shares, running[name].energies(units[name]))
        if name in running
        else GroupedLayer(diagonals[name], None, {}, {})
        for name in layers
    }


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
    owners: Mapping[str, int]
    progress: Progress | None
    num_passes: int = 3
    num_read: int = 0

    def read(
        self,
        layers: Mapping[str, nn.Module],
        needs: frozenset[MomentName],
        own_projections: Mapping[str, Projection] | None = None,
    ) -> Iterator[tuple[str, dict[str, LayerMoments]]]:
        """Yield each group's name and its moments by layer, summed over all ranks; a matrix is on its owner alone.

        Args:
            own_projections: The factors of the layers that this rank owns; the other ranks get them from here.
        """
        projections = None if own_projections is None else self._shared(layers, own_projections)
        for group, batches in self.groups.items():
            progress = share_of(self.progress, self.num_read, self.num_passes * len(self.groups))
            taps = Taps(layers, needs, self.options, projections or {})
            with _of_group(group), preserved(self.model):
                recorders = run_pass(self.model, batches, taps, progress)
                moments = {name: recorder.moments() for name, recorder in recorders.items()}
                refuse_unreached({name: own.num_tokens for name, own in moments.items()})
            self.num_read += 1
            reduced = reduce_moments(moments, self.owners)
            del recorders, moments  # the caller empties the other one
            yield group, reduced

    def _shared(self, layers: Iterable[str], own: Mapping[str, Projection]) -> dict[str, Projection]:
        """Send the factors of each layer from its owner to all ranks."""
        nothing = Projection()
        return {
            name: Projection(*(sent_by(self.owners[name], X) for X in vars(own.get(name, nothing)).values()))
            for name in layers
        }


@contextmanager
def _of_group(group: str) -> Iterator[None]:
    """Add the group's name to errors raised inside; no rank goes on if one fails."""
    with all_ranks_or_none():
        try:
            yield
        except CalibrationError as error:
            raise CalibrationError(f"Group {group!r}: {error}") from error
