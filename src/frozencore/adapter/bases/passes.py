"""Compute bases from calibration data, in as many passes as the memory requires."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.bases.batched_bases import batches_of_one_shape, build_batch
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.calibration.batches import Batch, is_batch
from frozencore.calibration.budget import (
    LayerCost,
    PassPlan,
    halved,
    layer_cost,
    memory_bytes,
    plan_passes,
)
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments, share_of
from frozencore.calibration.examples import CachedBatches
from frozencore.calibration.layer_owners import reduce_moments
from frozencore.constructors import BasisOptions, LayerEvidence
from frozencore.device import fits
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.capture import CAPTURE_NEEDS, Capture, capture_if_whole
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.ranks import all_ranks_or_none, largest_over_ranks, own_rank
from frozencore.words import Progress

LAYERS_OF_A_BLOCK = 8  # the most target modules in a decoder block


@dataclass
class BasisWork:
    """The layers of an adapter whose bases are being computed.

    Attributes:
        owners: The rank that builds each layer's basis.
        bases: Finished bases of the layers that this rank owns.
        diagonals: Token count, a and d of every layer with data.
        captures: The capture of each basis, if G, a and d were all summed.
        batches_layers: Build layers of one shape in batches. Memory budgets do not count this memory.
        captures_asked: Compute ``captures``.
        collect_s, build_s: Seconds in passes over the data, and in building bases.
    """

    model: nn.Module
    adapter_name: str
    config: FrozenCoreConfig
    layers: Mapping[str, FrozenCoreLayer]
    owners: Mapping[str, int]
    progress: Progress
    bases: dict[str, Basis] = field(default_factory=dict)
    diagonals: dict[str, LayerMoments] = field(default_factory=dict)
    captures: dict[str, Capture] = field(default_factory=dict)
    batches_layers: bool = True
    captures_asked: bool = True
    collect_s: float = 0.0
    build_s: float = 0.0

    def read(self, batches: Iterable[Batch], options: CalibrationOptions) -> None:
        """Plan and run the passes, and build the bases of each group before the next group is summed.

        A group that does not fit into memory is split in halves, which gives the same bases.
        """
        batches = batches if isinstance(batches, Sequence) else CachedBatches(batches)  # all passes read the same
        with all_ranks_or_none():
            if options.memory_budget is not None or options.group_size < len(self.layers):
                batches = list(batches)  # the plan needs their sizes
        plan = self.plan(batches, options)
        self.batches_layers = options.memory_budget is None
        device = _sums_device(self.model, plan, options.stats_device)
        options = replace(options, group_size=999, memory_budget=None, stats_device=device)
        done, left = 0, list(plan.groups)
        while left:
            progress = share_of(self.progress, done, done + len(left))
            if fits(partial(self._sum, left[0], batches, options, progress)):
                done, left = done + 1, left[1:]
            else:
                left = halved(left)

    def plan(self, batches: Iterable[Batch], options: CalibrationOptions) -> PassPlan:
        """Group the layers into passes."""
        names = list(self.layers)
        if options.memory_budget is None:
            size = options.group_size
            return PassPlan(tuple(tuple(names[i : i + size]) for i in range(0, len(names), size)))
        return plan_passes(
            self.costs(batches),
            memory_bytes(options.memory_budget),
            group_size=options.group_size,
        )

    def costs(self, batches: Iterable[Batch]) -> dict[str, LayerCost]:
        """The bytes of each layer, equal on all ranks."""
        num_rows = largest_over_ranks(max(map(_num_rows, batches), default=0))
        itemsize = max((p.element_size() for p in self.model.parameters() if p.is_floating_point()), default=4)
        in_place = self.config.metric is not None
        costs = {
            name: layer_cost(
                layer.shape, self._needs, self._rank(name), num_rows=num_rows, itemsize=itemsize, in_place=in_place
            )
            for name, layer in self.layers.items()
        }  # fmt: skip
        if not getattr(self.model, "is_gradient_checkpointing", False):
            return costs
        return {  # only one block's inputs are kept at a time
            name: replace(cost, waiting=0, passing=cost.passing + LAYERS_OF_A_BLOCK * cost.waiting)
            for name, cost in costs.items()
        }

    def build(self, names: Iterable[str], moments: dict[str, LayerMoments]) -> None:
        """Build the bases of this rank's layers; each entry of ``moments`` is removed after use."""
        started = time.perf_counter()
        names = list(names)
        with all_ranks_or_none():
            options = {name: self._options_of(name) for name in names}
            batches: list[tuple[str, ...]] = [(name,) for name in names]
            if self.batches_layers:
                batches = batches_of_one_shape(names, moments, self.config.constructor, options)
            for batch in batches:
                evidence = [self._evidence(name, moments.pop(name, None)) for name in batch]
                own = [layer for layer in evidence if self.owners[layer.name] == own_rank()]
                built = build_batch(self.config.constructor, own, [options[layer.name] for layer in own])
                for layer, basis in zip(own, built, strict=True):
                    self._keep(layer.name, basis)
                    if self.captures_asked and (found := capture_if_whole(layer.moments, basis)) is not None:
                        self.captures[layer.name] = found
        self.build_s += time.perf_counter() - started

    def like_factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Empty tensors with the shapes of a layer's P and Q."""
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
        """Sum the moments over all batches and ranks; a matrix stays on its layer's owner."""
        started = time.perf_counter()
        with all_ranks_or_none(), adapters_off(self.model):
            layers = {name: self.layers[name].get_base_layer() for name in group}
            moments = collect_moments(
                self.model, batches, layers, needs=self._needs, options=options, progress=progress
            )
        reduced = reduce_moments(moments, self.owners)
        moments.clear()
        self.collect_s += time.perf_counter() - started
        return reduced

    @property
    def _needs(self) -> frozenset[MomentName]:
        """The moments that the constructor reads; with G also a and d, which the captures need."""
        needs = self.config.needs
        return needs | CAPTURE_NEEDS if "cross" in needs else needs

    def _rank(self, name: str) -> int:
        return len(self.layers[name].core(self.adapter_name))

    def _options_of(self, name: str) -> BasisOptions:
        return self.config.basis_options(self._rank(name))

    def _evidence(self, name: str, moments: LayerMoments | None) -> LayerEvidence:
        layer = self.layers[name]
        if moments is not None:
            self.diagonals[name] = moments.without_matrices()
            if moments.num_tokens < self._rank(name):
                raise CalibrationError(
                    f"A basis of rank {self._rank(name)} needs at least {self._rank(name)} counted tokens, but layer "
                    f"{name!r} received {moments.num_tokens}. Calibrate on more text, or give a lower rank."
                )
        return LayerEvidence(name, layer.shape, layer.dense_weight, moments)

    def _keep(self, name: str, basis: Basis) -> None:
        self.layers[name].require_rank(self._rank(name), basis)
        self.bases[name] = basis
        self.progress("bases", len(self.bases), sum(owner == own_rank() for owner in self.owners.values()))


def _num_rows(batch: Batch) -> int:
    """Tokens of a batch, padding included."""
    if not is_batch(batch):  # reading it raises the error
        return 0
    return max((v.shape[0] * v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.ndim > 1), default=0)


def _sums_device(model: nn.Module, plan: PassPlan, asked: str | None) -> str | None:
    """The device of the sums: the requested one, else the CPU if the plan does not fit on the model's device."""
    device = next(model.parameters()).device
    if asked is not None or plan.peak_bytes == 0 or device.type != "cuda":
        return asked
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None if plan.peak_bytes <= torch.cuda.mem_get_info(device)[0] + unused else "cpu"


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn off all adapters and ``modules_to_save``, so that the plain base model computes."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled
