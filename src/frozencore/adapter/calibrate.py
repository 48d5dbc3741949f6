"""``calibrate(model, dataloader)``: collect the moments of the adapted layers, build their bases, set them.

A memory budget makes groups of layers; each group is collected and built before the next one. A group that does not fit
into memory is split in halves, which gives the same bases.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from frozencore.adapter.bases import adapter_for_new_bases
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLinear
from frozencore.calibration.batches import Batch, Collator, batches_from, tensors_of
from frozencore.calibration.calibration_options import (
    CalibrationOptions,
    LayerCost,
    halved,
    layer_cost,
    memory_bytes,
    plan_passes,
)
from frozencore.calibration.collect import collect_moments, require_options_fit, share_of
from frozencore.calibration.taps import LossFn
from frozencore.constructors import BasisOptions, LayerData, build_basis, find_constructor
from frozencore.constructors.fcca import whitened_cross_moment
from frozencore.device import run_unless_oom
from frozencore.distributed import (
    all_ranks_or_none,
    assign_owners,
    enter_together,
    gathered,
    largest_over_ranks,
    num_ranks,
    own_rank,
    reduce_moments,
    require_same_bases,
)
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.capture import CAPTURE_NEEDS, Capture, capture_if_whole
from frozencore.maths.linalg import TruncatedSVD, truncated_svds
from frozencore.maths.moments import LayerMoments, MomentName, spread
from frozencore.quiet import with_attributes
from frozencore.text import Progress

LAYERS_OF_A_BLOCK = 8  # the most target modules in a decoder block
BATCH_BYTES = 128 * 2**20  # whitened cross moments held at a time on a GPU


@dataclass(frozen=True)
class LayerCalibration:
    """The result of a calibration in one layer.

    Attributes:
        spectrum: The constructor's singular values, largest first.
        input_spread, error_spread: Maximum over median of a and of d; None if they were not collected.
        capture: How much of G, a and d the basis captures; None if one of them was not summed.
    """

    rank: int
    effective_rank: int
    num_tokens: int
    spectrum: tuple[float, ...]
    input_spread: float | None
    error_spread: float | None
    capture: Capture | None = None


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: per layer, and the seconds that the pass and the bases took."""

    layers: dict[str, LayerCalibration]
    collect_s: float
    build_s: float

    @property
    def time_s(self) -> float:
        return self.collect_s + self.build_s

    @property
    def captures(self) -> dict[str, Capture]:
        """The captures of the layers where they are known."""
        return {name: layer.capture for name, layer in self.layers.items() if layer.capture is not None}


def calibrate(
    model: nn.Module,
    data: Iterable[Any] | Dataset[Any] | None = None,
    *,
    adapter_name: str | None = None,
    collator: Collator | None = None,
    batch_size: int | None = None,
    num_examples: int | None = None,
    options: CalibrationOptions | None = None,
    memory_budget: int | str | None = None,
    moments: Mapping[str, LayerMoments] | None = None,
    loss_fn: LossFn | None = None,
    reset: bool = False,
    progress: bool | Progress = True,
) -> Calibration:
    """Choose the bases of a frozen-core adapter from calibration examples and reset its cores to zero.

    Args:
        model: A model with a frozen-core adapter, from ``peft.get_peft_model``.
        data: Batches with ``input_ids``, ``attention_mask`` and ``labels``, from a DataLoader or any finite iterable;
            or batches of images or sound for a model that returns a loss. With ``collator``, tokenised rows: a
            ``datasets.Dataset``, a PyTorch dataset, or a list. Read once.
        adapter_name: The adapter to calibrate; the active one by default.
        collator: Makes a batch from a list of rows, as in ``Trainer``.
        batch_size: Rows in a batch that the collator makes; 8 by default.
        num_examples: Stop after this number of examples; required for endless data and streams.
        options: Options of the pass, see :class:`frozencore.calibration.calibration_options.CalibrationOptions`.
        memory_budget: The memory beyond a plain forward and backward pass, such as ``"8GB"``, or a number of bytes.
            It decides the number of passes and the device of the sums (docs/large-models.md). Also in ``options``.
        moments: Moments collected before, by layer name, in place of ``data``.
        loss_fn: ``loss_fn(model, batch) -> loss`` instead of the model's own loss: one number, the mean over the
            batch's examples, weighed by their number (the length of the batch's first tensor). A batch is then any
            dictionary, list or tuple with tensors in it. An ``attention_mask`` (b x t) of a call of the model decides
            which tokens count, in layers with a row for each token; in other layers every row counts, an image's
            patches for instance. Tokens that the loss masks have no error, and add nothing to G and d.
        reset: Allow a new basis under a core that has been trained (the core is lost).
        progress: True shows a bar, False nothing; a function is called with ``(stage, done, total, note="")``.

    In a process group (``torchrun``, ``accelerate launch``) every rank calls this with its own share of the examples,
    before the model is wrapped; all ranks then hold the same bases.

    Returns:
        The result in each layer. The model's weights, modes, hooks, gradients and RNG are as before.

    Raises:
        CalibrationError: Nothing to calibrate, a trained core without ``reset``, merged adapters, bad moments, no
            memory for a single layer, or a rank that failed or is gone. No basis is changed then.
        ConfigError: The memory budget is not a size, or is too small for a single layer; the message names the
            smallest budget that works.
        DataError: The data are not batches, or rows that the collator cannot read.
    """
    enter_together("frozencore.calibrate")
    started = time.perf_counter()
    adapter_name, config, layers = adapter_for_new_bases(model, adapter_name, reset=reset)
    targets = targets_of(layers, adapter_name)
    num_own = sum(target.is_own for target in targets.values())
    options = options or CalibrationOptions()
    require_options_fit(options, loss_fn)
    if memory_budget is not None:
        options = replace(options, memory_budget=memory_budget)
    with _reporting(progress) as tell:
        if config.needs and moments is None:
            if data is None:
                raise CalibrationError(f"{config.constructor} reads data: call calibrate(model, dataloader).")
            with all_ranks_or_none():
                batches = batches_from(
                    data, collator=collator, batch_size=batch_size, num_examples=num_examples,
                    any_form=loss_fn is not None,
                )  # fmt: skip
            built, collect_s = _collect_and_build(model, config, targets, batches, options, loss_fn, tell)
        else:
            built, collect_s = _build(config, targets, dict(moments or {}), tell, (0, num_own)), 0.0
    bases = gathered({name: one.basis.to("cpu") for name, one in built.items() if one.basis is not None})
    require_same_bases({name: (basis.P, basis.Q) for name, basis in bases.items()})
    captures = gathered({name: one.capture for name, one in built.items() if one.capture is not None})
    for name, layer in layers.items():
        start = config.constructor_entry.start_core(
            bases[name], config.basis_options(), layer.frozencore_scale[adapter_name]
        )
        layer.set_basis(adapter_name, bases[name], start_core=start, random_core=not config.init_weights)
    config.name_basis(None)
    if counts := [one.diagonals.num_tokens for one in built.values() if one.diagonals is not None]:
        config.calibration_tokens = max(counts)
    _warn_of_weak_layers(bases, layers)
    return Calibration(
        layers={name: _describe(bases[name], built[name].diagonals, captures.get(name)) for name in layers},
        collect_s=collect_s,
        build_s=time.perf_counter() - started - collect_s,
    )


@dataclass(frozen=True)
class Target:
    """A layer that gets a basis, the rank of its core, and the process that builds the basis."""

    layer: FrozenCoreLinear
    rank: int
    owner: int

    @property
    def is_own(self) -> bool:
        return self.owner == own_rank()


def targets_of(layers: Mapping[str, FrozenCoreLinear], adapter_name: str) -> dict[str, Target]:
    """The layers of an adapter by name, their work spread over all processes."""
    work_of_svd = {name: layer.shape[0] * layer.shape[1] * min(layer.shape) for name, layer in layers.items()}
    owners = assign_owners(work_of_svd, num_ranks())
    return {name: Target(layer, len(layer.core(adapter_name)), owners[name]) for name, layer in layers.items()}


@dataclass(frozen=True)
class BuiltLayer:
    """The basis of a layer (None in processes that do not own it), token count with a and d, and the capture."""

    basis: Basis | None
    diagonals: LayerMoments | None
    capture: Capture | None


def _collect_and_build(
    model: nn.Module,
    config: FrozenCoreConfig,
    targets: Mapping[str, Target],
    batches: Sequence[Batch],
    options: CalibrationOptions,
    loss_fn: LossFn | None,
    tell: Progress,
) -> tuple[dict[str, BuiltLayer], float]:
    """Collect and build group by group; returns the layers, and the seconds in passes over the data."""
    names, size = list(targets), options.group_size
    left, peak_bytes = [tuple(names[i : i + size]) for i in range(0, len(names), size)], 0
    if options.memory_budget is not None:
        costs = layer_costs(model, config, targets, batches)
        left, peak_bytes = plan_passes(costs, memory_bytes(options.memory_budget), group_size=size)
    batched = options.memory_budget is None  # budgets do not count the memory of batched SVDs
    device = _sums_device(model, peak_bytes, options.stats_device)
    options = replace(options, group_size=999, memory_budget=None, stats_device=device)
    num_own = sum(target.is_own for target in targets.values())
    built: dict[str, BuiltLayer] = {}
    collect_s, done = 0.0, 0

    def work() -> None:
        nonlocal collect_s
        started, group = time.perf_counter(), {name: targets[name] for name in left[0]}
        with all_ranks_or_none(), _adapters_off(model):
            base_layers = {name: target.layer.get_base_layer() for name, target in group.items()}
            progress = share_of(tell, done, done + len(left))
            own = collect_moments(
                model, batches, base_layers, needs=_needs(config), options=options, loss_fn=loss_fn, progress=progress
            )
        moments = reduce_moments(own, {name: target.owner for name, target in group.items()})
        own.clear()
        collect_s += time.perf_counter() - started
        num_built = sum(one.basis is not None for one in built.values())
        built.update(_build(config, group, moments, tell, (num_built, num_own), batched=batched))

    while left:
        if run_unless_oom(work):
            done, left = done + 1, left[1:]
        else:
            left = halved(left)
    return built, collect_s


def _needs(config: FrozenCoreConfig) -> frozenset[MomentName]:
    """The moments that the constructor reads; with G also a and d, which the captures need."""
    return config.needs | CAPTURE_NEEDS if "cross" in config.needs else config.needs


def layer_costs(
    model: nn.Module, config: FrozenCoreConfig, targets: Mapping[str, Target], batches: Iterable[Batch]
) -> dict[str, LayerCost]:
    """The bytes of each layer, equal on all ranks."""
    num_rows = largest_over_ranks(max(map(_num_rows, batches), default=0))
    itemsize = max((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4)
    needs, in_place = _needs(config), config.constructor_entry.metric(config.basis_options()) is not None
    costs = {
        name: layer_cost(
            target.layer.shape, needs, target.rank, num_rows=num_rows, itemsize=itemsize, in_place=in_place
        )
        for name, target in targets.items()
    }
    if not getattr(model, "is_gradient_checkpointing", False):
        return costs
    return {  # only one block's inputs are kept at a time
        name: replace(cost, waiting=0, passing=cost.passing + LAYERS_OF_A_BLOCK * cost.waiting)
        for name, cost in costs.items()
    }


def _num_rows(batch: Batch) -> int:
    """Tokens of a batch of any form, padding included."""
    return max((tensor.shape[0] * tensor.shape[1] for tensor in tensors_of(batch) if tensor.ndim > 1), default=0)


def _sums_device(model: nn.Module, peak_bytes: int, asked: str | None) -> str | None:
    """The device of the sums: the requested one, else the CPU if the plan does not fit on the model's device."""
    device = next(model.parameters()).device
    if asked is not None or peak_bytes == 0 or device.type != "cuda":
        return asked
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None if peak_bytes <= torch.cuda.mem_get_info(device)[0] + unused else "cpu"


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn off all adapters and ``modules_to_save``, so that the plain base model computes."""
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                undo.enter_context(with_attributes(module, _disable_adapters=True))
        yield


def _build(
    config: FrozenCoreConfig,
    targets: Mapping[str, Target],
    moments: dict[str, LayerMoments],
    tell: Progress,
    count: tuple[int, int],
    *,
    batched: bool = True,
) -> dict[str, BuiltLayer]:
    """Build the bases of this process's layers; each entry of ``moments`` is removed after use.

    Args:
        count: The number of bases that were built before, and in all.
    """
    built: dict[str, BuiltLayer] = {}
    options = {name: config.basis_options(target.rank) for name, target in targets.items()}
    with all_ranks_or_none():
        batches = batches_of_one_shape(targets, moments, config.constructor, options) if batched else zip(targets)
        for batch in batches:
            evidence = {}
            for name in batch:
                layer = targets[name].layer
                one = LayerData(name, layer.shape, layer.dense_weight, moments.pop(name, None))
                if one.moments is not None and one.moments.num_tokens < targets[name].rank:
                    raise CalibrationError(
                        f"A basis of rank {targets[name].rank} needs at least {targets[name].rank} counted tokens, but "
                        f"layer {name!r} received {one.moments.num_tokens}. Calibrate on more text, or give a lower "
                        "rank."
                    )
                evidence[name] = one
            own = [name for name in batch if targets[name].is_own]
            found = build_batch(config.constructor, [evidence[name] for name in own], [options[name] for name in own])
            for name, basis in zip(own, found, strict=True):
                targets[name].layer.require_fit(targets[name].rank, basis)
            bases = dict(zip(own, found, strict=True))
            for name, one in evidence.items():
                diagonals = None if one.moments is None else one.moments.without_matrices()
                capture = capture_if_whole(one.moments, bases[name]) if name in bases else None
                built[name] = BuiltLayer(bases.get(name), diagonals, capture)
                if name in bases:
                    tell("bases", count[0] + sum(one.basis is not None for one in built.values()), count[1])
    return built


def batches_of_one_shape(
    names: Iterable[str],
    moments: Mapping[str, LayerMoments],
    constructor: str,
    options: Mapping[str, BasisOptions],
) -> list[list[str]]:
    """Group layers whose bases come from one batched SVD, because single SVDs on a GPU wait for launches.

    Other layers are groups of one. On a CPU every layer is: this is as fast, and a layer's bytes do not depend on other
    layers.
    """
    groups: dict[object, list[list[str]]] = {}
    for name in names:
        own, G = options[name], moments[name].cross if name in moments else None
        metric = find_constructor(constructor).metric(own)
        if G is None or not _is_on_gpu(G) or own.svd_method != "auto" or metric is None:
            groups[name] = [[name]]
            continue
        most = max(1, BATCH_BYTES // (G.numel() * G.element_size()))
        batches = groups.setdefault((G.shape, G.device, own.rank), [[]])
        if len(batches[-1]) == most:
            batches.append([])
        batches[-1].append(name)
    return [batch for batches in groups.values() for batch in batches]


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def build_batch(constructor: str, layers: Sequence[LayerData], options: Sequence[BasisOptions]) -> list[Basis]:
    """Build a group of :func:`batches_of_one_shape`; equals ``build_basis`` except for rounding."""
    if len(layers) < 2:
        return [build_basis(constructor, layer, own) for layer, own in zip(layers, options, strict=True)]
    row, whitened = find_constructor(constructor), []
    for layer, own in zip(layers, options, strict=True):
        try:
            metric = row.metric(own)
            assert metric is not None
            whitened.append(whitened_cross_moment(layer.data, metric))
        except CalibrationError as error:
            raise CalibrationError(f"Layer {layer.name!r}: {error}") from error
    T = torch.stack(whitened)
    whitened.clear()
    seeds = [layer.seed(own.seed) for layer, own in zip(layers, options, strict=True)]
    bases = []
    for layer, own, svd, has_signal in zip(
        layers, options, truncated_svds(T, options[0].rank, seeds=seeds), T.flatten(1).any(1).tolist(), strict=True
    ):
        if not has_signal:  # a layer without gradient has no directions
            svd = TruncatedSVD(svd.U[:, :0], svd.S[:0], svd.V[:, :0])
        bases.append(row.build_of_svd(layer, svd, own))
    return bases


def _warn_of_weak_layers(bases: Mapping[str, Basis], layers: Mapping[str, Any]) -> None:
    empty = [name for name, basis in bases.items() if basis.effective_rank == 0]
    partial = [name for name, basis in bases.items() if 0 < basis.effective_rank < basis.rank]
    for names, what in (
        (empty, "received no signal; their bases are seeded random directions"),
        (partial, "have fewer independent directions than the rank; the rest are seeded random ones"),
    ):
        if names:
            is_half = any(layers[name].weight.dtype == torch.float16 for name in names)
            way_out = " Small gradients are zero in float16: load the model in bfloat16 or float32 (dtype=, --dtype)."
            warnings.warn(
                f"{len(names)} of {len(bases)} layers {what} (first: {names[0]}).{way_out if is_half else ''}",
                stacklevel=3,
            )


def _describe(basis: Basis, diagonals: LayerMoments | None, capture: Capture | None) -> LayerCalibration:
    collected = diagonals.names() if diagonals else ()
    return LayerCalibration(
        rank=basis.rank,
        effective_rank=basis.effective_rank,
        num_tokens=diagonals.num_tokens if diagonals else 0,
        spectrum=tuple(basis.spectrum.tolist()),
        input_spread=spread(diagonals.a) if diagonals and "input_square" in collected else None,
        error_spread=spread(diagonals.d) if diagonals and "error_square" in collected else None,
        capture=capture,
    )


@contextmanager
def _reporting(progress: bool | Progress) -> Iterator[Progress]:
    if callable(progress):
        yield progress
        return
    bars: dict[str, tqdm] = {}

    def show(stage: str, done: int, total: int | None, note: str = "") -> None:
        if stage not in bars:
            bars[stage] = tqdm(desc=stage, disable=not progress)
        bars[stage].total = total  # the total grows when memory runs out
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
