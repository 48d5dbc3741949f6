"""A rank budget spent: from two halves of the calibration data to a rank for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from frozencore.adapter.bases.gains import GainWork
from frozencore.adapter.bases.passes import BasisWork
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.calibration.batches import Batch
from frozencore.calibration.options import CalibrationOptions
from frozencore.constructors.options import trained_values
from frozencore.errors import CalibrationError
from frozencore.maths.allocation import allocate_ranks, num_candidates
from frozencore.maths.moments import LayerMoments


@dataclass
class GivenMoments:
    """Moments by layer name, of all examples or in parts, each of some of them."""

    parts: list[dict[str, LayerMoments]]

    @classmethod
    def of(cls, moments: Mapping[str, LayerMoments] | Sequence[Mapping[str, LayerMoments]] | None) -> GivenMoments:
        """As :func:`frozencore.calibrate` takes them."""
        return cls([dict(part) for part in ([moments] if isinstance(moments, Mapping) else moments or ())])

    def taken(self) -> dict[str, LayerMoments]:
        """The sums over the parts, which are then empty: who gets them is their only holder."""
        first, *others = self.parts or [{}]
        self.parts = []
        for other in others:
            for name in first:
                first[name] = first[name] + other.pop(name)
        return first


BasisSource = Iterable[Batch] | GivenMoments


def spends_by_spectrum(config: FrozenCoreConfig) -> bool:
    """Whether calibration is to choose ranks; other constructors have had equal ones from the start."""
    return config.rank_budget is not None and config.constructor_entry.has_gains


def spend_budget(work: BasisWork, source: BasisSource, options: CalibrationOptions) -> tuple[BasisWork, BasisSource]:
    """The work that is left when every layer has its rank, on the layers that got one, and what it is to read.

    The model is not changed.

    Args:
        work: On all layers that may be adapted, not begun.

    Raises:
        CalibrationError: Moments that are not of two halves, or halves that agree on nothing.
    """
    budget, layers = trained_values(work.config.rank_budget), work.layers
    shapes = {name: layer.shape for name, layer in layers.items()}
    counts = {name: num_candidates(shape, len(layers), budget) for name, shape in shapes.items()}
    gains = GainWork(work.model, work.adapter_name, work.config, layers, work.owners, work.progress, ranks=counts)
    if isinstance(source, GivenMoments):
        if len(source.parts) != 2:
            raise CalibrationError(
                "A rank budget is spent on what two halves of the calibration examples agree on, but moments of all of "
                "them came. Pass moments=(those of one half, those of the other), or data."
            )
        gains.compare([{name: part[name] for name in layers} for part in source.parts])
    else:
        source = list(source)
        gains.read(source, options)
    ranks = allocate_ranks(gains.all_gains(), budget)
    adapted = {name: layer for name, layer in layers.items() if ranks[name]}
    if not adapted:
        raise CalibrationError(
            f"The two halves of the calibration examples agree on no direction of any of the {len(layers)} layers, so "
            "a rank budget cannot be spent. Calibrate on more text, or give a rank instead."
        )
    kept = {name: gains.kept[name] for name in adapted if name in gains.kept}
    left = replace(work, layers=adapted, ranks=ranks, collect_s=gains.collect_s)
    return left, GivenMoments([kept]) if kept else source
