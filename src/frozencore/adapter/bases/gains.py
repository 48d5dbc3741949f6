"""What the directions of each layer are worth to a rank budget, from two halves of the calibration data.

The work is that between data and bases, with the same plans of passes and the same way out of too little memory; but
each half is summed by itself, and what comes out is gains.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from frozencore.adapter.bases.calibratable import adapters_off
from frozencore.adapter.bases.passes import BasisWork
from frozencore.calibration.batches import Batch, in_halves
from frozencore.calibration.budget import LayerCost
from frozencore.calibration.collect import share_of
from frozencore.calibration.options import CalibrationOptions
from frozencore.calibration.sketch import crossed
from frozencore.constructors import LayerEvidence
from frozencore.maths.agreement import gains_of
from frozencore.maths.moments import LayerMoments
from frozencore.ranks import all_ranks_or_none, gathered, own_rank
from frozencore.words import Progress


@dataclass
class GainWork(BasisWork):
    """Layers on the way to their gains; ``ranks`` is how many directions of each are looked at.

    Attributes:
        gains: Of the layers that this process owns, one number a direction.
        kept: The moments of both halves together, where all layers were summed at once; they are then not summed again.
    """

    gains: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kept: dict[str, LayerMoments] = field(default_factory=dict)

    def all_gains(self) -> dict[str, tuple[float, ...]]:
        """Of every layer, on every process, in the order of the layers."""
        found = gathered(self.gains)
        return {name: found[name] for name in self.layers}

    def compare(self, halves: Sequence[dict[str, LayerMoments]]) -> None:
        """Gains from the moments of both halves, which are emptied: their sums are kept if they are of all layers."""
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
        """Two sums at a time, or the directions of the first sketch beside the second; no basis stays."""
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
