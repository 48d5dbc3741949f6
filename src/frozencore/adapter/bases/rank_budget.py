"""Choose a rank for each layer from a rank budget and two halves of the calibration data, or from groups of rows.

The gain of a direction is the part on which both halves agree. For groups the examples are not halved
(:class:`frozencore.adapter.bases.bases_of_groups.GroupGainWork`). The passes are those of
:mod:`frozencore.adapter.bases.passes`, with the same plans and the same handling of too little memory, but each half is
summed separately.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from frozencore.adapter.bases.bases_of_groups import GroupGainWork, GroupWork
from frozencore.adapter.bases.passes import BasisWork, adapters_off
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.calibration.batches import Batch, in_halves
from frozencore.calibration.budget import LayerCost
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import share_of
from frozencore.calibration.sketch import crossed
from frozencore.constructors import LayerEvidence
from frozencore.constructors.basis_options import trained_values
from frozencore.errors import CalibrationError
from frozencore.maths.allocation import allocate_ranks, gains_of, num_candidates
from frozencore.maths.moments import LayerMoments
from frozencore.ranks import all_ranks_or_none, gathered, own_rank
from frozencore.words import Progress


@dataclass
class GivenMoments:
    """Moments by layer name, over all examples or over parts of them."""

    parts: list[dict[str, LayerMoments]]

    @classmethod
    def of(cls, moments: Mapping[str, LayerMoments] | Sequence[Mapping[str, LayerMoments]] | None) -> GivenMoments:
        """The moments that :func:`frozencore.calibrate` was given."""
        return cls([dict(part) for part in ([moments] if isinstance(moments, Mapping) else moments or ())])

    def taken(self) -> dict[str, LayerMoments]:
        """The sums over the parts. The caller owns the tensors; nothing else refers to them."""
        first, *others = self.parts or [{}]
        self.parts = []
        for other in others:
            for name in first:
                first[name] = first[name] + other.pop(name)
        return first


@dataclass
class GainWork(BasisWork):
    """Layers whose gains are being computed; ``ranks`` holds the number of directions of each layer.

    Attributes:
        gains: One number a direction, for the layers that this rank owns.
        kept: The moments of both halves together, if all layers were summed at once; they need no second pass.
    """

    gains: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kept: dict[str, LayerMoments] = field(default_factory=dict)

    def all_gains(self) -> dict[str, tuple[float, ...]]:
        """The gains of every layer, on every rank, in the order of the layers."""
        found = gathered(self.gains)
        return {name: found[name] for name in self.layers}

    def compare(self, halves: Sequence[dict[str, LayerMoments]]) -> None:
        """Compute gains from the moments of both halves and empty them; keep their sums if they cover all layers."""
        started = time.perf_counter()
        with all_ranks_or_none():
            one, other = halves
            keeps = one.keys() == self.layers.keys()
            for name in list(one):
                first, second = one.pop(name), other.pop(name)
                if self.owners[name] == own_rank():
                    self.gains[name] = self._gains(name, first, second)
                    self._tell()
                if keeps:
                    self.kept[name] = first + second
        self.build_s += time.perf_counter() - started

    def costs(self, batches: Iterable[Batch], of_the_pass: CalibrationOptions) -> dict[str, LayerCost]:
        """The bytes of a layer while its gains are computed: two sums, or a sketch and the directions of another."""
        shapes = {name: layer.shape for name, layer in self.layers.items()}
        return {
            name: replace(
                cost,
                sums=2 * cost.sums,
                building=cost.building + 8 * shapes[name][0] * shapes[name][1],
                basis=0,
                sketch=None if cost.sketch is None else cost.sketch + 8 * self._rank(name) * sum(shapes[name]),
            )
            for name, cost in super().costs(batches, of_the_pass).items()
        }

    def _sum(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> None:
        self.compare(
            [
                self._sums(group, half, options, share_of(progress, number, 2))
                for number, half in enumerate(self._halves(batches))
            ]
        )

    def _stream(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> None:
        started = time.perf_counter()
        halves, names = self._halves(batches), list(group)
        sketches = [
            self._sketches(names, half, options, share_of(progress, number, 3)) for number, half in enumerate(halves)
        ]
        layers = {name: self.layers[name].get_base_layer() for name in names}
        with adapters_off(self.model):
            C1, C2 = (
                crossed(
                    self.model, half, layers, other, own, whitening=self._metric, options=options,
                    progress=share_of(share_of(progress, 2, 3), number, 2),
                )
                for number, (half, own, other) in enumerate(zip(halves, sketches, sketches[::-1], strict=True))
            )  # fmt: skip
        for name in names:
            if self.owners[name] == own_rank():
                reached = all(len(sketch[name].svd.S) for sketch in sketches)
                self.gains[name] = _plain(gains_of(C1[name], C2[name])) if reached else (0.0,)
                self._tell()
        self.collect_s += time.perf_counter() - started

    def _halves(self, batches: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
        with all_ranks_or_none():
            return in_halves(batches)

    def _gains(self, name: str, first: LayerMoments, second: LayerMoments) -> tuple[float, ...]:
        row, layer = self.config.constructor_entry, self.layers[name]
        evidence = LayerEvidence(name, layer.shape, layer.dense_weight)
        return _plain(row.gains((first, second), evidence, self._rank(name), self.config.basis_options()))

    def _tell(self) -> None:
        self.progress("ranks", len(self.gains), sum(owner == own_rank() for owner in self.owners.values()))


def _plain(gains: Tensor) -> tuple[float, ...]:
    return tuple(gains.to(torch.float64).tolist())


BasisSource = Iterable[Batch] | GivenMoments


def spends_by_spectrum(config: FrozenCoreConfig) -> bool:
    """Return whether calibration chooses the ranks; constructors without gains have equal ranks from the start."""
    return config.rank_budget is not None and config.constructor_entry.has_gains


def spend_budget(work: BasisWork, source: BasisSource, options: CalibrationOptions) -> tuple[BasisWork, BasisSource]:
    """Choose the ranks, and return the work on the layers with a rank, and its source. The model is not changed.

    Args:
        work: New work on all layers that may be adapted.
    """
    budget, layers = trained_values(work.config.rank_budget), work.layers
    shapes = {name: layer.shape for name, layer in layers.items()}
    counts = {name: num_candidates(shape, len(layers), budget) for name, shape in shapes.items()}
    if isinstance(work, GroupWork):
        return _spent_on_groups(work, counts, budget, source, options)
    gains = GainWork(work.model, work.adapter_name, work.config, layers, work.owners, work.progress, ranks=counts)
    if isinstance(source, GivenMoments):
        if len(source.parts) != 2:
            raise CalibrationError(
                "A rank budget compares two halves of the calibration examples, but the moments of all of them came. "
                "Pass moments=(those of one half, those of the other), or data."
            )
        gains.compare([{name: part[name] for name in layers} for part in source.parts])
    else:
        source = list(source)
        gains.read(source, options)
    left = _allocated(work, gains, budget, "The two halves of the calibration examples agree on no direction of any")
    kept = {name: gains.kept[name] for name in left.layers if name in gains.kept}
    return left, GivenMoments([kept]) if kept else source


def _spent_on_groups(
    work: GroupWork, counts: Mapping[str, int], budget: int, source: BasisSource, options: CalibrationOptions
) -> tuple[BasisWork, BasisSource]:
    """Choose the ranks from the spans of the groups. The bases of these ranks take new passes over the same rows."""
    assert not isinstance(source, GivenMoments)
    source = list(source)
    gains = GroupGainWork(
        work.model, work.adapter_name, work.config, work.layers, work.owners, work.progress, ranks=counts,
        groups=work.groups, weights=work.weights,
    )  # fmt: skip
    gains.read(source, options)
    return _allocated(work, gains, budget, "The gradients of the groups reach none"), source


def _allocated(work: BasisWork, gains: GainWork | GroupGainWork, budget: int, nothing: str) -> BasisWork:
    """The work on the layers with a rank; ``nothing`` starts the error if there is none."""
    ranks = allocate_ranks(gains.all_gains(), budget)
    adapted = {name: layer for name, layer in work.layers.items() if ranks[name]}
    if not adapted:
        raise CalibrationError(
            f"{nothing} of the {len(work.layers)} layers, so a rank budget cannot be spent. Calibrate on more text, or "
            "give a rank instead."
        )
    return replace(work, layers=adapted, ranks=ranks, collect_s=gains.collect_s)
