"""The data of advice: the layers of a plain model, and their moments in two halves of the examples."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.model import FrozenCoreConfig
from frozencore.advice.settings import On, Setting
from frozencore.calibration.batches import Batch, in_halves, is_of_tokens, num_examples_of, put_together
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments, share_of
from frozencore.calibration.loss import is_language_model, loss_fn_of
from frozencore.constructors import CONSTRUCTORS, DEFAULT, LayerEvidence
from frozencore.maths.allocation import (
    Crossed,
    allocate_ranks,
    allocations,
    crossed_by_gram,
    gains_of,
    num_candidates,
    uniform_ranks,
)
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.linalg import Shape, TruncatedSVD
from frozencore.maths.moments import DenseMoment, LayerMoments, MomentName, spread
from frozencore.words import Progress

MOST_DENSE_BYTES = 8 * 2**30  # limit for dense second moments of all linear layers, if not requested
DENSE: frozenset[MomentName] = frozenset({"input_outer", "error_outer"})
TOKENS_AT_ONCE = 1024  # padding included


@dataclass
class EigenCache:
    """The leading eigenpairs of second moments so far; several constructors and layers need the same ones."""

    pairs: dict[int, list[tuple[Tensor, int, Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))

    def find(self, total: Tensor, num_tokens: int, rank: int) -> tuple[Tensor, Tensor] | None:
        """The cached eigenpairs of an equal moment; None if fewer are cached."""
        for held, count, vectors, values in self.pairs[len(total)]:
            if count == num_tokens and len(values) >= rank and (held is total or torch.equal(held, total)):
                return vectors[:, :rank], values[:rank]
        return None


@dataclass(frozen=True)
class CachedMoments(LayerMoments):
    """Moments of one layer, with a cache that all layers share."""

    cache: EigenCache = field(default_factory=EigenCache)

    def leading(self, name: DenseMoment, rank: int) -> tuple[Tensor, Tensor]:
        total = self.total(name)
        found = self.cache.find(total, self.num_tokens, rank)
        if found is None:
            found = super().leading(name, rank)
            self.cache.pairs[len(total)].append((total, self.num_tokens, *found))
        return found


@dataclass(frozen=True)
class Spreads:
    """The size of outlier channels: maximum over median of a layer's second moments, a of inputs and d of errors."""

    median_a: float
    largest_a: float
    median_d: float
    largest_d: float


@dataclass(frozen=True)
class Evidence:
    """A model's layers and their moments in the two halves.

    Attributes:
        layers: Every layer that some setting adapts, by name.
        names: The names of the requested layers, and of all linear layers if these are tried.
        seen: Moments of the half that gives bases and steps, including dense ones.
        unseen: G, a and d of the other half.
        held_back: Batches of the other half.
        modules: The layers of the plain model.
        tell: Receives the progress, layer by layer.
        crossed: The leading directions of one half in the other, by setting and layer, computed when needed.
    """

    layers: Mapping[str, FrozenCoreLayer]
    names: Mapping[On, tuple[str, ...]]
    seen: Mapping[str, LayerMoments]
    unseen: Mapping[str, LayerMoments]
    held_back: Sequence[Batch]
    modules: Mapping[str, nn.Module]
    tell: Progress
    crossed: dict[Hashable, Crossed] = field(default_factory=dict)

    def of_layer(self, name: str) -> LayerEvidence:
        """The data for a constructor in a layer, from one half."""
        layer = self.layers[name]
        return LayerEvidence(name, layer.shape, lambda: layer.dense_weight().float(), self.seen[name])

    def ranks_of(self, setting: Setting, seed: int) -> dict[str, int]:
        """Equal ranks, or ranks from a budget by the directions that both halves agree on."""
        shapes = {name: self.layers[name].shape for name in self.names[setting.on]}
        if setting.rank is not None:
            return {name: min(setting.rank, *shape) for name, shape in shapes.items()}
        assert setting.rank_budget is not None
        if not CONSTRUCTORS[setting.method].has_gains:
            return uniform_ranks(shapes, setting.rank_budget)
        return allocate_ranks(self._gains(setting, shapes, setting.rank_budget, seed), setting.rank_budget)

    def bought(self, budgets: Sequence[int], seed: int) -> dict[int, float]:
        """The share of the agreed whitened gradient that the default constructor's ranks hold, by budget."""
        default = Setting(DEFAULT, on=max(self.names, key=lambda on: len(self.names[on])))
        shapes = {name: self.layers[name].shape for name in self.names[default.on]}
        gains = self._gains(default, shapes, max(budgets), seed)
        total = sum(map(sum, gains.values()))
        spent = dict(zip(budgets, allocations(gains, budgets), strict=True))
        return {
            budget: sum(sum(gains[name][:rank]) for name, rank in ranks.items()) / total if total else 0.0
            for budget, ranks in spent.items()
        }

    def num_agreed(self, rank: int, seed: int) -> float:
        """The number of the median layer's ``rank`` leading whitened directions that both halves agree on."""
        counts = dict.fromkeys(self.names["asked"], rank)
        found = self._agreed_of(Setting(DEFAULT, rank=rank), counts, seed)
        return median(sum(gain > 0 for gain in gains) for gains in found.values())

    def spreads(self) -> Spreads:
        """The spreads of the requested layers, over all examples."""
        halves = [(self.seen[name], self.unseen[name]) for name in self.names["asked"]]
        a = [spread(one.total("input_square") + other.total("input_square")) for one, other in halves]
        d = [spread(one.total("error_square") + other.total("error_square")) for one, other in halves]
        return Spreads(median(a), max(a), median(d), max(d))

    def _gains(self, setting: Setting, shapes: Mapping[str, Shape], budget: int, seed: int) -> dict[str, list[float]]:
        counts = {name: num_candidates(shape, len(shapes), budget) for name, shape in shapes.items()}
        return self._agreed_of(setting, counts, seed)

    def _agreed_of(self, setting: Setting, counts: Mapping[str, int], seed: int) -> dict[str, list[float]]:
        found = {}
        for number, (name, count) in enumerate(counts.items(), start=1):
            found[name] = self._agreed(setting, name, count, seed)
            self.tell("halves", number, len(counts))
        return found

    def _agreed(self, setting: Setting, name: str, count: int, seed: int) -> list[float]:
        """The gain of each of a layer's leading directions in both halves; 0 is noise."""
        key = _key(setting, name)
        if key not in self.crossed or len(self.crossed[key].C1) < count:
            row, options = CONSTRUCTORS[setting.method], setting.basis_options(count, seed)
            one, other = (row.matrix(moments, options) for moments in (self.seen[name], self.unseen[name]))
            self.crossed[key] = crossed_by_gram(one, other, min(count, *one.shape))
        C1, C2, _ = self.crossed[key]
        gains: list[float] = gains_of(C1[:count, :count], C2[:count, :count]).tolist()
        return gains

    def known_svd(self, setting: Setting, name: str, rank: int) -> TruncatedSVD | None:
        """The leading singular triples of a layer's basis, if already known."""
        found = self.crossed.get(_key(setting, name))
        reads_more = CONSTRUCTORS[setting.method].metric(setting.basis_options(rank, 0)) is None
        if found is None or reads_more or len(found.C1) < rank or not found.first.S[0]:
            return None
        return TruncatedSVD(*(part[..., :rank].float() for part in found.first))


def _key(setting: Setting, name: str) -> Hashable:
    return setting.method, tuple(setting.options.items()), name


def gather(
    model: nn.Module,
    batches: Sequence[Batch],
    target_modules: Any,
    options: CalibrationOptions,
    progress: Progress | None,
    *,
    settings: Sequence[Setting],
    elsewhere: bool,
) -> Evidence:
    """Read the examples: one forward and one backward pass over each.

    Args:
        settings: The settings to try, which decide the moments.
        elsewhere: Try all linear layers too, if their dense second moments take no more than 8 GiB.
    """
    layers = _layers(model, target_modules)
    names: dict[On, tuple[str, ...]] = {"asked": tuple(layers)}
    if elsewhere:
        every = _layers(model, "all-linear")
        dense = sum(4 * (m * m + n * n) for m, n in (layer.shape for layer in every.values()))
        if every.keys() > layers.keys() and dense <= MOST_DENSE_BYTES:
            layers, names["all-linear"] = every, tuple(every)
    modules = {name: layer.get_base_layer() for name, layer in layers.items()}
    needs = CAPTURE_NEEDS | DENSE.union(*(setting.needs for setting in settings))
    to_agree = CAPTURE_NEEDS.union(*(setting.needs for setting in settings if setting.spends_by_spectrum))
    halves = in_halves(batches)
    seen, unseen = (
        collect_moments(
            model,
            larger_batches(model, half, options),
            modules,
            needs=own,
            options=options,
            progress=share_of(progress, number, 2),
        )
        for number, (half, own) in enumerate(zip(halves, (needs, to_agree), strict=True))
    )
    cache = EigenCache()
    seen = {name: CachedMoments(**vars(moments), cache=cache) for name, moments in seen.items()}
    return Evidence(layers, names, seen, unseen, halves[1], modules, progress or (lambda *_: None))


def plain_pass_s(
    model: nn.Module, batches: Sequence[Batch], layers: Mapping[str, nn.Module], options: CalibrationOptions
) -> float:
    """Estimate the processor seconds of one calibration pass for the default constructor, by timing one batch."""
    middle = batches[len(batches) // 2]
    started = time.process_time()
    collect_moments(model, [middle], layers, needs=CAPTURE_NEEDS, options=options)
    return (time.process_time() - started) * sum(map(_size, batches)) / _size(middle)


def _size(batch: Batch) -> int:
    return batch["input_ids"].numel() if is_of_tokens(batch) else num_examples_of(batch)


def _layers(model: Any, target_modules: Any) -> dict[str, FrozenCoreLayer]:
    """The layers of an adapter on these targets; the adapter is removed from the model again."""
    config = FrozenCoreConfig(r=1, target_modules=target_modules, constructor="random", load_bases=True)
    adapted = get_peft_model(model, config)  # builds no basis
    layers = frozen_core_layers(adapted, "default")
    adapted.unload()
    return layers


def larger_batches(model: nn.Module, batches: Sequence[Batch], options: CalibrationOptions) -> Sequence[Batch]:
    """Join short rows into batches of at most 1,024 tokens to save time, if the loss is over tokens."""
    return put_together(batches, TOKENS_AT_ONCE) if _by_row(model, options) else batches


def copies_at_once(model: nn.Module, batches: Sequence[Batch], options: CalibrationOptions) -> int:
    """The number of copies of these rows in 1,024 tokens; 1 if copies could not be told apart."""
    if not (_by_row(model, options) and all(map(is_of_tokens, batches))):
        return 1
    return max(1, TOKENS_AT_ONCE // max(batch["input_ids"].numel() for batch in batches))


def _by_row(model: nn.Module, options: CalibrationOptions) -> bool:
    return is_language_model(model) and loss_fn_of(options) is None
