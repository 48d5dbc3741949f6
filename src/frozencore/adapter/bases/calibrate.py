"""``calibrate(model, dataloader)``: one pass over the examples fixes P and Q of every adapted layer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from frozencore.adapter.bases.access import adapter_for_new_bases
from frozencore.adapter.bases.passes import BasisWork
from frozencore.calibration.batches import Batch
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.examples import Collator, batches_from
from frozencore.calibration.layer_owners import assign_owners, require_same_bases, share_bases
from frozencore.calibration.loss import LossFn, with_loss
from frozencore.errors import CalibrationError
from frozencore.maths.basis import Basis
from frozencore.maths.capture import Capture
from frozencore.maths.moments import LayerMoments, spread
from frozencore.ranks import all_ranks_or_none, enter_together, gathered
from frozencore.words import Progress


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
    """The result of a calibration: per layer, and the seconds that the pass and the bases took.

    Attributes:
    """

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
    adapter_name, config, layers = adapter_for_new_bases(model, adapter_name, reset=reset)
    options = with_loss(options, loss_fn)
    if memory_budget is not None:
        options = replace(options, memory_budget=memory_budget)
    owners = assign_owners({name: layer.shape for name, layer in layers.items()})
    started = time.perf_counter()
    with reporting(progress) as tell:
        work = BasisWork(model, adapter_name, config, layers, owners, tell)
        batches: Iterable[Batch] | None = None
        if config.needs and moments is None:
            if data is None:
                raise CalibrationError(f"{config.constructor} reads data: call calibrate(model, dataloader).")
            with all_ranks_or_none():
                batches = batches_from(
                    data, collator=collator, batch_size=batch_size, num_examples=num_examples,
                    any_form=loss_fn is not None,
                )  # fmt: skip
        if batches is None:
            work.build(layers, dict(moments or {}))
        else:
            work.read(batches, options)
    bases = share_bases(work.bases, owners, {name: work.like_factors(name) for name in work.layers})
    require_same_bases({name: (basis.P, basis.Q) for name, basis in bases.items()})
    captures = gathered(work.captures)
    for name, layer in work.layers.items():
        scale = layer.frozencore_scale[adapter_name]
        start = config.constructor_entry.start_core(bases[name], config.basis_options(), scale)
        layer.set_basis(adapter_name, bases[name], start_core=start, random_core=not config.init_weights)
    config.name_basis(None)
    if work.diagonals:
        config.calibration_tokens = max(layer.num_tokens for layer in work.diagonals.values())
    warn_of_weak_layers(bases, work.layers)
    return Calibration(
        layers={name: describe(bases[name], work.diagonals.get(name), captures.get(name)) for name in work.layers},
        collect_s=work.collect_s,
        build_s=time.perf_counter() - started - work.collect_s,
    )


def warn_of_weak_layers(bases: Mapping[str, Basis], layers: Mapping[str, Any]) -> None:
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


def describe(basis: Basis, moments: LayerMoments | None, capture: Capture | None) -> LayerCalibration:
    collected = moments.names() if moments else ()
    return LayerCalibration(
        rank=basis.rank,
        effective_rank=basis.effective_rank,
        num_tokens=moments.num_tokens if moments else 0,
        spectrum=tuple(basis.spectrum.tolist()),
        input_spread=spread(moments.a) if moments and "input_square" in collected else None,
        error_spread=spread(moments.d) if moments and "error_square" in collected else None,
        capture=capture,
    )


@contextmanager
def reporting(progress: bool | Progress) -> Iterator[Progress]:
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
