"""Compute bases for groups of rows (tenants, tasks) that fit every group as well as possible."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from statistics import fmean

from frozencore.adapter.bases.passes import BasisWork, adapters_off
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.calibration.batches import Batch
from frozencore.calibration.budget import LayerCost
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.group_moments import GroupedLayer, collect_groups
from frozencore.calibration.running_spans import num_kept, span_width
from frozencore.errors import CalibrationError, ConfigError
from frozencore.maths.basis import Basis
from frozencore.maths.groups import Share, mean_share
from frozencore.ranks import all_ranks_or_none, gathered, of_every_rank, own_rank
from frozencore.words import Progress, nearest_name, one_line


@dataclass
class GroupWork(BasisWork):
    """Layers whose bases for groups are being computed.

    Attributes:
        groups: The batches of each group.
        weights: The weight of each group in the sum that the bases maximise.
        beside: The bases that grow, by layer; None if bases are chosen anew.
        shares: The share of each group's whitened moment that the basis holds, by layer and group; of the layers that
            this rank owns.
    """

    groups: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, Basis] | None = None
    shares: dict[str, dict[str, Share]] = field(default_factory=dict)

    def share_of_groups(self) -> dict[str, Share]:
        """The mean share of each group over the layers that its gradient reaches; every rank must call it."""
        found, shares = {}, gathered(self.shares)
        for group in self.groups:
            own = [layer[group] for layer in shares.values() if group in layer]
            if own:
                found[group] = mean_share(own)
        return found

    def costs(self, batches: Iterable[Batch], of_the_pass: CalibrationOptions) -> dict[str, LayerCost]:
        """The bytes of each layer: the sums, factors, and small matrices, whose number is limited; no sketches."""
        costs = {}
        for name, cost in super().costs(batches, of_the_pass).items():
            m, n = self.layers[name].shape
            given = 0 if self.beside is None else self.beside[name].rank
            p = given + span_width((m, n), self._rank(name), len(self.groups), given)
            small = min(len(self.groups), num_kept((m, n), p)) * p * p
            costs[name] = replace(
                cost,
                sums=cost.sums + 4 * (4 * p * (m + n) + small),
                building=2 * cost.building + 4 * 8 * small,  # the small matrices in float64, and a sum's temporaries
                sketch=None,
            )
        return costs

    def _sum(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> None:
        found = self._collected(group, options, progress)
        started = time.perf_counter()
        with all_ranks_or_none():
            for name in list(found):
                layer = found.pop(name)
                evidence = self._evidence(name, layer.diagonals)
                if layer.spans is None:
                    continue
                own = None if self.beside is None else self.beside[name]
                basis = self.config.constructor_entry.build_grouped(evidence, layer.spans, self._options_of(name), own)
                self._keep(name, basis)
                self.shares[name] = layer.shares
        self.build_s += time.perf_counter() - started

    def _collected(
        self, names: Iterable[str], options: CalibrationOptions, progress: Progress | None
    ) -> dict[str, GroupedLayer]:
        started, names = time.perf_counter(), list(names)
        with adapters_off(self.model):
            found = collect_groups(
                self.model,
                self.groups,
                {name: self.layers[name].get_base_layer() for name in names},
                {name: self._rank(name) for name in names},
                whitening=self._metric,
                options=options,
                weights=self.weights,
                owners=self.owners,
                beside=self.beside,
                progress=progress,
            )
        self.collect_s += time.perf_counter() - started
        return found


def require_groups(
    groups: Mapping[str, object], config: FrozenCoreConfig, weights: Mapping[str, float] | None
) -> dict[str, float]:
    """Check the requirements of a basis for groups, and return the weight of each group, 1 on average.

    Every rank must call it.

    Args:
        weights: Weights by group; a group without one has the weight 1.

    Raises:
        ConfigError: There is no group, the constructor reads more than a whitened cross moment, a weight is not a
            positive number or not a group's.
        CalibrationError: The groups or their weights differ between ranks.
    """
    with all_ranks_or_none():
        _require_groups(groups, config)
        found = _mean_one(groups, weights or {})
    for rank, theirs in enumerate(of_every_rank(list(found.items()))):
        if theirs != list(found.items()):
            raise CalibrationError(
                f"All ranks must name the same groups in the same order, with the same weights, but those of rank "
                f"{own_rank()} and rank {rank} differ. Give each rank its own rows of every group."
            )
    return found


def _require_groups(groups: Mapping[str, object], config: FrozenCoreConfig) -> None:
    if not groups:
        raise ConfigError("groups must name the rows of one group at least, but is empty. Give {name: batches, ...}.")
    if config.metric is None:
        raise ConfigError(
            "A basis for groups is made of whitened cross moments alone, but "
            f"{config.constructor!r} here reads others. Use fcca with diagonal moments, or rawgrad."
        )


def _mean_one(groups: Mapping[str, object], weights: Mapping[str, float]) -> dict[str, float]:
    """The weight of each group, divided by the mean weight."""
    for name, weight in weights.items():
        if name not in groups:
            near = nearest_name(str(name), groups)
            advice = "Give weights for groups alone." if near is None else f"Did you mean {near!r}?"
            raise ConfigError(f"weights names {one_line(name, 60)!r}, but there is no such group. {advice}")
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not (is_number and math.isfinite(weight) and weight > 0):
            raise ConfigError(f"A group's weight is a positive finite number, but {name!r} has {weight!r:.60}.")
    found = {name: float(weights.get(name, 1)) for name in groups}
    mean = fmean(found.values())
    return {name: weight / mean for name, weight in found.items()}
