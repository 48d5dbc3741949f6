"""The work between calibration data and finished bases, in as many passes as a memory budget asks for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from frozencore.adapter.bases.calibratable import adapters_off, require_tokens
from frozencore.adapter.bases.room import halved, sums_device
from frozencore.adapter.bases.together import build_together, in_batches
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.calibration.batches import Batch, is_batch
from frozencore.calibration.budget import LayerCost, PassPlan, layer_cost, memory_bytes, plan_passes
from frozencore.calibration.collect import collect_moments, share_of
from frozencore.calibration.examples import KeptBatches
from frozencore.calibration.options import CalibrationOptions, backward_passes
from frozencore.calibration.shards import reduce_moments
from frozencore.calibration.sketch import Sketch, SketchTarget, stream_whitened_svds
from frozencore.constructors import BasisOptions, LayerEvidence, build_basis
from frozencore.device import fits
from frozencore.maths.basis import Basis
from frozencore.maths.capture import CAPTURE_NEEDS, Capture, capture_if_whole
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.maths.whitening import Whitening
from frozencore.ranks import all_ranks_or_none, largest_over_ranks, own_rank
from frozencore.words import Progress

LAYERS_OF_A_BLOCK = 8  # target modules in a decoder block, at most


@dataclass
class BasisWork:
    """Layers on the way to their bases.

    Attributes:
        owners: The rank that builds each layer's basis.
        ranks: By layer, where it is not that of the adapter as it is.
        bases: Finished ones, of the layers that this rank owns.
        diagonals: Token count, a and d of every layer that data were read for.
        captures: What each of those bases captures, where G, a and d were all at hand.
        builds_together: Whether layers of one shape may be built in batches, which takes memory that no budget has
            counted.
        captures_asked: Whether anybody will read those.
        collect_s, build_s: Seconds in passes over the data, and in bases.
    """

    model: nn.Module
    adapter_name: str
    config: FrozenCoreConfig
    layers: Mapping[str, FrozenCoreLayer]
    owners: Mapping[str, int]
    progress: Progress
    ranks: Mapping[str, int] = field(default_factory=dict)
    bases: dict[str, Basis] = field(default_factory=dict)
    diagonals: dict[str, LayerMoments] = field(default_factory=dict)
    captures: dict[str, Capture] = field(default_factory=dict)
    builds_together: bool = True
    captures_asked: bool = True
    collect_s: float = 0.0
    build_s: float = 0.0

    def read(self, batches: Iterable[Batch], options: CalibrationOptions) -> None:
        """Plan the passes, make them, and build the bases of each group before the next one is summed.

        A group for which there is no room comes again in halves: that takes more passes and gives the same bases.

        Raises:
            CalibrationError: There is no room for a single layer.
        """
        batches = batches if isinstance(batches, Sequence) else KeptBatches(batches)  # every pass must read the same
        with all_ranks_or_none():
            if options.memory_budget is not None or options.group_size < len(self.layers):
                batches = list(batches)  # to see how large they are
        plan = self.plan(batches, options)
        self.builds_together = options.memory_budget is None
        options = replace(
            options,
            group_size=999,
            memory_budget=None,
            stats_device=sums_device(self.model, plan, options.stats_device),
        )
        make = self._stream if plan.streaming else self._sum
        done, left = 0, list(plan.groups)
        while left:
            progress = share_of(self.progress, done, done + len(left))
            if fits(partial(make, left[0], batches, options, progress)):
                done, left = done + 1, left[1:]
            else:
                left = halved(left)

    def plan(self, batches: Iterable[Batch], options: CalibrationOptions) -> PassPlan:
        """Which layers are calibrated together, and how."""
        names = list(self.layers)
        if options.memory_budget is None:
            size = options.group_size
            return PassPlan(tuple(tuple(names[i : i + size]) for i in range(0, len(names), size)))
        return plan_passes(
            self.costs(batches, options),
            memory_bytes(options.memory_budget),
            group_size=options.group_size,
            num_backward=len(backward_passes(self._needs(options), options)),
        )

    def costs(self, batches: Iterable[Batch], of_the_pass: CalibrationOptions) -> dict[str, LayerCost]:
        """Bytes of each layer, the same on all ranks."""
        options, entry = self.config.basis_options(), self.config.constructor_entry
        num_rows = largest_over_ranks(max(map(_num_rows, batches), default=0))
        itemsize = max((p.element_size() for p in self.model.parameters() if p.is_floating_point()), default=4)
        costs = {
            name: layer_cost(
                layer.shape,
                self._needs(of_the_pass),
                self._rank(name),
                num_rows=num_rows,
                itemsize=itemsize,
                streams=entry.metric(options) is not None,
                keeps_graph=len(backward_passes(self._needs(of_the_pass), of_the_pass)) > 1,
            )
            for name, layer in self.layers.items()
        }
        if not getattr(self.model, "is_gradient_checkpointing", False):
            return costs
        return {  # only the inputs of one block wait at a time
            name: replace(cost, waiting=0, passing=cost.passing + LAYERS_OF_A_BLOCK * cost.waiting)
            for name, cost in costs.items()
        }

    def build(self, names: Iterable[str], moments: dict[str, LayerMoments]) -> None:
        """Bases of those layers that this rank owns. ``moments`` is emptied: each goes once its basis is built."""
        started = time.perf_counter()
        names = list(names)
        with all_ranks_or_none():
            for batch in self._batches(names, moments):
                evidence = [self._evidence(name, moments.pop(name, None)) for name in batch]
                own = [layer for layer in evidence if self.owners[layer.name] == own_rank()]
                for layer, basis in zip(own, self._built(own), strict=True):
                    self._keep(layer.name, basis)
                    if self.captures_asked and (found := capture_if_whole(layer.moments, basis)) is not None:
                        self.captures[layer.name] = found
        self.build_s += time.perf_counter() - started

    def build_streamed(self, sketches: Iterable[tuple[str, Sketch]]) -> None:
        """The same from sketches, by layer name, which every rank has."""
        started = time.perf_counter()
        with all_ranks_or_none():
            for name, sketch in sketches:
                evidence = self._evidence(name, sketch.diagonals)
                if self.owners[name] == own_rank():
                    basis = self.config.constructor_entry.build_streamed(evidence, sketch.svd, self._options_of(name))
                    self._keep(name, basis)
        self.build_s += time.perf_counter() - started

    def _batches(self, names: list[str], moments: Mapping[str, LayerMoments]) -> list[tuple[str, ...]]:
        if not self.builds_together:
            return [(name,) for name in names]
        options = {name: self._options_of(name) for name in names}
        return in_batches(names, moments, self.config.constructor, options)

    def _built(self, layers: Sequence[LayerEvidence]) -> list[Basis]:
        options = [self._options_of(layer.name) for layer in layers]
        if len(layers) > 1:
            return list(build_together(self.config.constructor, layers, options).values())
        return [build_basis(self.config.constructor, *pair) for pair in zip(layers, options, strict=True)]

    def like_factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Of the shapes of a layer's P and Q, without values."""
        layer, rank = self.layers[name], self._rank(name)
        P, Q = (torch.empty(size, rank, device="meta") for size in layer.shape)
        return P, Q

    def _sum(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> None:
        self.build(group, self._sums(group, batches, options, progress))

    def _sums(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> dict[str, LayerMoments]:
        """Over all batches and processes, of a single holder; matrices are where the owner of their layer is."""
        started = time.perf_counter()
        with all_ranks_or_none(), adapters_off(self.model):
            moments = collect_moments(
                self.model,
                batches,
                {name: self.layers[name].get_base_layer() for name in group},
                needs=self._needs(options),
                options=options,
                progress=progress,
            )
        reduced = reduce_moments(moments, self.owners)
        moments.clear()
        self.collect_s += time.perf_counter() - started
        return reduced

    def _stream(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> None:
        started = time.perf_counter()
        sketches = self._sketches(group, batches, options, progress)
        self.collect_s += time.perf_counter() - started
        self.build_streamed(sketches.items())

    def _sketches(
        self, group: Iterable[str], batches: Iterable[Batch], options: CalibrationOptions, progress: Progress | None
    ) -> dict[str, Sketch]:
        with adapters_off(self.model):
            return stream_whitened_svds(
                self.model,
                batches,
                {
                    name: SketchTarget(layer.get_base_layer(), layer.shape, self._rank(name))
                    for name, layer in ((name, self.layers[name]) for name in group)
                },
                whitening=self._metric,
                options=options,
                progress=progress,
            )

    @property
    def _metric(self) -> Whitening:
        """Of a constructor of which a sketch will do."""
        metric = self.config.constructor_entry.metric(self.config.basis_options())
        assert metric is not None
        return metric

    def _needs(self, options: CalibrationOptions) -> frozenset[MomentName]:
        """What the constructor reads; with G come a and d, two vectors, by which it is told what a basis captures."""
        needs = self.config.constructor_entry.needs(self.config.basis_options())
        whole = needs | CAPTURE_NEEDS
        as_many = len(backward_passes(needs, options)) == len(backward_passes(whole, options))
        return whole if "cross" in needs and as_many else needs

    def _rank(self, name: str) -> int:
        return self.ranks[name] if name in self.ranks else len(self.layers[name].core(self.adapter_name))

    def _options_of(self, name: str) -> BasisOptions:
        return self.config.basis_options(self._rank(name))

    def _evidence(self, name: str, moments: LayerMoments | None) -> LayerEvidence:
        layer = self.layers[name]
        if moments is not None:
            self.diagonals[name] = moments.without_matrices()
        evidence = LayerEvidence(name, layer.shape, layer.dense_weight, moments)
        require_tokens(evidence, self._rank(name))
        return evidence

    def _keep(self, name: str, basis: Basis) -> None:
        self.layers[name].require_rank(self._rank(name), basis)
        self.bases[name] = basis
        self.progress("bases", len(self.bases), sum(owner == own_rank() for owner in self.owners.values()))


def _num_rows(batch: Batch) -> int:
    """Tokens of a batch, padding included."""
    if not is_batch(batch):  # refused when it is read
        return 0
    return max((v.shape[0] * v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.ndim > 1), default=0)
