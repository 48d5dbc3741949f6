"""``calibrate(model, dataloader)``: one pass over the examples fixes P and Q of every adapted layer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from tqdm.auto import tqdm

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.adapter.model import frozen_core_layers
from frozencore.basis import Basis
from frozencore.calibration.collect import Batch, collect_moments, take_examples
from frozencore.calibration.options import CalibrationOptions
from frozencore.constructors import LayerEvidence, build_basis
from frozencore.errors import CalibrationError, ConfigError
from frozencore.moments import LayerMoments, spread

Report = Callable[[str, int, int | None], None]
"""Called with the stage (``"calibration"`` or ``"bases"``), the steps done, and their total if it is known."""


@dataclass(frozen=True)
class LayerCalibration:
    """What calibration found in one layer.

    Attributes:
        spectrum: The constructor's singular values, largest first.
        input_spread, error_spread: Maximum over median of a and of d; None where they were not collected.
    """

    rank: int
    effective_rank: int
    num_tokens: int
    spectrum: tuple[float, ...]
    input_spread: float | None
    error_spread: float | None


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: per layer, and the seconds that the pass and the bases took."""

    layers: dict[str, LayerCalibration]
    collect_s: float
    build_s: float

    @property
    def time_s(self) -> float:
        return self.collect_s + self.build_s


def calibrate(
    model: nn.Module,
    data: Iterable[Batch] | None = None,
    *,
    adapter_name: str | None = None,
    num_examples: int | None = None,
    options: CalibrationOptions | None = None,
    moments: Mapping[str, LayerMoments] | None = None,
    reset: bool = False,
    progress: bool | Report = True,
) -> Calibration:
    """Choose the bases of a frozen-core adapter from calibration examples and reset its cores to zero.

    Args:
        model: A model with a frozen-core adapter, from ``peft.get_peft_model``.
        data: Batches with ``input_ids``, ``attention_mask`` and ``labels``; read once (once per layer group).
        adapter_name: The adapter to calibrate; the active one by default.
        num_examples: Stop after that many examples; an endless loader needs it.
        options: Options of the pass, see :class:`frozencore.calibration.options.CalibrationOptions`.
        moments: Moments collected before, by layer name, instead of ``data``.
        reset: Allow a new basis under a core that has been trained (the core is lost).
        progress: Show a bar, stay silent, or call a function of your own.

    Returns:
        What was found in each layer. The model's weights, modes, hooks, gradients and RNG are as before.

    Raises:
        CalibrationError: Nothing to calibrate, a trained core without ``reset``, merged adapters, or bad moments.
            No basis is changed then.
    """
    adapter_name, config = _adapter_to_calibrate(model, adapter_name)
    layers = frozen_core_layers(model, adapter_name)
    _refuse_merged(model)
    _refuse_trained(layers, adapter_name, reset)
    needs = config.constructor_entry.needs(config.basis_options())
    started = time.perf_counter()
    with _reporting(progress) as report:
        if needs and moments is None:
            if data is None:
                raise CalibrationError(f"{config.constructor} reads data: call calibrate(model, dataloader).")
            batches = data if num_examples is None else list(take_examples(data, num_examples))
            with _adapters_off(model):
                moments = collect_moments(
                    model,
                    batches,
                    {name: layer.get_base_layer() for name, layer in layers.items()},
                    needs=needs,
                    options=options,
                    progress=lambda done, total: report("calibration", done, total),
                )
        collected = time.perf_counter()
        bases = _build_bases(layers, adapter_name, config, moments or {}, report)
    for name, layer in layers.items():
        layer.set_basis(
            adapter_name, bases[name], initial_step=config.initial_step, random_core=not config.init_weights
        )
    if moments:
        config.calibration_tokens = max(layer.num_tokens for layer in moments.values())
    _warn_of_weak_layers(bases)
    return Calibration(
        layers={name: _describe(bases[name], (moments or {}).get(name)) for name in layers},
        collect_s=collected - started,
        build_s=time.perf_counter() - collected,
    )


def _adapter_to_calibrate(model: nn.Module, adapter_name: str | None) -> tuple[str, FrozenCoreConfig]:
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if adapter_name is None and configs:  # a model of transformers without adapters raises for its active ones
        active = getattr(model, "active_adapters", None)
        names = active() if callable(active) else active
        adapter_name = next(iter(names or configs), None)
    config = configs.get(adapter_name) if adapter_name is not None else None
    if adapter_name is None or not isinstance(config, FrozenCoreConfig):
        known = [name for name, other in configs.items() if isinstance(other, FrozenCoreConfig)]
        raise ConfigError(
            f"calibrate needs a frozen-core adapter, but the model has {known or 'none'} and {adapter_name!r} was "
            "asked for. Call peft.get_peft_model(model, FrozenCoreConfig(...)) first."
        )
    return adapter_name, config


def _refuse_merged(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and layer.merged:
            raise CalibrationError(
                f"Calibration looks at the base weights, but layer {name!r} has an adapter merged into them. "
                "Call unmerge_adapter() first."
            )


def _refuse_trained(layers: Mapping[str, FrozenCoreLayer], adapter_name: str, reset: bool) -> None:
    for name, layer in layers.items():
        if not reset and bool(layer.factors(adapter_name)[2].any()):
            raise CalibrationError(
                f"The core of layer {name!r} is not zero: a new basis under it would change what it means. "
                "Pass reset=True to give up what it learned."
            )


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    """The plain base model, whatever adapters and ``modules_to_save`` are active on it."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


def _build_bases(
    layers: Mapping[str, FrozenCoreLayer],
    adapter_name: str,
    config: FrozenCoreConfig,
    moments: Mapping[str, LayerMoments],
    report: Report,
) -> dict[str, Basis]:
    bases: dict[str, Basis] = {}
    for done, (name, layer) in enumerate(layers.items(), start=1):
        evidence = LayerEvidence(name, (layer.out_features, layer.in_features), layer.dense_weight, moments.get(name))
        rank = layer.factors(adapter_name)[2].shape[0]
        _require_tokens(evidence, rank)
        bases[name] = build_basis(config.constructor, evidence, config.basis_options(rank))
        layer.require_fit(adapter_name, bases[name])
        report("bases", done, len(layers))
    return bases


def _require_tokens(evidence: LayerEvidence, rank: int) -> None:
    if evidence.moments is not None and evidence.moments.num_tokens < rank:
        raise CalibrationError(
            f"A basis of rank {rank} needs at least {rank} counted tokens, but layer {evidence.name!r} received "
            f"{evidence.moments.num_tokens}. Calibrate on more text."
        )


def _warn_of_weak_layers(bases: Mapping[str, Basis]) -> None:
    empty = [name for name, basis in bases.items() if basis.effective_rank == 0]
    partial = [name for name, basis in bases.items() if 0 < basis.effective_rank < basis.rank]
    for names, what in (
        (empty, "received no signal; their bases are seeded random directions"),
        (partial, "have fewer independent directions than the rank; the rest are seeded random ones"),
    ):
        if names:
            warnings.warn(f"{len(names)} of {len(bases)} layers {what} (first: {names[0]}).", stacklevel=3)


def _describe(basis: Basis, moments: LayerMoments | None) -> LayerCalibration:
    collected = moments.names() if moments else ()
    return LayerCalibration(
        rank=basis.rank,
        effective_rank=basis.effective_rank,
        num_tokens=moments.num_tokens if moments else 0,
        spectrum=tuple(basis.spectrum.tolist()),
        input_spread=spread(moments.a) if moments and "input_square" in collected else None,
        error_spread=spread(moments.d) if moments and "error_square" in collected else None,
    )


@contextmanager
def _reporting(progress: bool | Report) -> Iterator[Report]:
    if callable(progress):
        yield progress
        return
    bars: dict[str, tqdm] = {}

    def show(stage: str, done: int, total: int | None) -> None:
        if stage not in bars:
            bars[stage] = tqdm(desc=stage, total=total, disable=not progress)
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
