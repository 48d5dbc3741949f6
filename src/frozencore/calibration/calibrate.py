"""Calibrate layers: collect their moments, and build their bases. ``frozencore.adapter.calibrate`` sets them.

Groups of layers are collected and built one after the other. A group that does not fit into memory is split in halves,
which gives the same bases. In a process group each layer has an owner, which builds its basis.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from frozencore.calibration.batches import Batch
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.calibration.hooks import LossFn
from frozencore.constructors import DEFAULT, BasisOptions, LayerData, build_basis, find_constructor
from frozencore.device import run_unless_oom
from frozencore.distributed import assign_owners, gathered, num_ranks, own_rank, raise_on_any_rank, reduce_moments
from frozencore.errors import CalibrationError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.capture import CAPTURE_NEEDS, Capture, capture_or_none
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.progress import Progress, share_of


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

    @classmethod
    def of(cls, basis: LayerBasis, vectors: LayerMoments | None, capture: Capture | None) -> LayerCalibration:
        """Describe a basis; ``vectors`` are the moments of its layer, without matrices."""
        return cls(
            rank=basis.rank,
            effective_rank=basis.effective_rank,
            num_tokens=vectors.num_tokens if vectors else 0,
            spectrum=tuple(basis.spectrum.tolist()),
            input_spread=vectors.max_over_median("input_square") if vectors else None,
            error_spread=vectors.max_over_median("error_square") if vectors else None,
            capture=capture,
        )


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: per layer, and the seconds that the pass and the bases took.

    Attributes:
        learning_rate: The peak learning rate that the examples propose for the cores and AdamW; None without
            examples that have labels.
    """

    layers: dict[str, LayerCalibration]
    collect_s: float
    build_s: float
    learning_rate: float | None = None

    @property
    def time_s(self) -> float:
        return self.collect_s + self.build_s

    @property
    def captures(self) -> dict[str, Capture]:
        """The captures of the layers where they are known."""
        return {name: layer.capture for name, layer in self.layers.items() if layer.capture is not None}


@dataclass(frozen=True)
class Target:
    """A layer that gets a basis: the module that computes it, its shape and weight, and the options of its basis."""

    module: nn.Module
    layer: LayerData
    options: BasisOptions


def build_bases(
    layers: Iterable[LayerData], constructor: str = DEFAULT, options: BasisOptions | None = None
) -> dict[str, LayerBasis]:
    """Build the basis of each layer, by layer name; ``frozencore.set_basis`` takes the result.

    Args:
        layers: Name, shape, weight and moments of each layer, for instance those of ``collect_moments``.
        options: Rank and options of the constructor.

    Raises:
        CalibrationError: A moment is missing or not finite.
        ConfigError: There is no such constructor.

    >>> layer = LayerData("layer", (6, 4), lambda: torch.eye(6, 4))
    >>> build_bases([layer], "lora_xs", BasisOptions(r=2))["layer"].P.shape
    torch.Size([6, 2])
    """
    options, bases = options or BasisOptions(), {}
    for layer in layers:
        bases[layer.name] = build_basis(constructor, layer, options)
    return bases


def calibrate_layers(
    model: nn.Module,
    targets: Mapping[str, Target],
    constructor: str,
    *,
    batches: Sequence[Batch],
    moments: Mapping[str, LayerMoments] | None,
    options: CalibrationOptions,
    loss_fn: LossFn | None,
    progress: Progress,
) -> tuple[dict[str, LayerBasis], Calibration]:
    """Collect the moments of the layers if the constructor reads any, and build their bases, equal on all ranks.

    Args:
        targets: Layers by name.
        moments: Moments collected before, in place of ``batches``.

    Raises:
        CalibrationError: As :func:`build_bases` and ``collect_moments``, or no memory for a single layer.
    """
    started, collect_s, num_done = time.perf_counter(), 0.0, 0
    builder = _Builder(constructor, targets, progress)
    progress("calibration", 0, None)  # the work before the first batch belongs to this stage
    names, needs = list(targets), _needs(constructor, targets)
    groups = [names[i : i + options.group_size] for i in range(0, len(names), options.group_size)]

    def collect_and_build() -> None:
        nonlocal collect_s
        group, start = groups[0], time.perf_counter()
        with raise_on_any_rank():
            moments_here = collect_moments(
                model, batches, {name: targets[name].module for name in group}, needs=needs, loss_fn=loss_fn,
                options=replace(options, group_size=len(group)),
                progress=share_of(progress, num_done, num_done + len(groups)),
            )  # fmt: skip
        sums = reduce_moments(moments_here, builder.owners)
        moments_here.clear()
        collect_s += time.perf_counter() - start
        builder.build(group, sums)

    if not needs or moments is not None:
        builder.build(names, dict(moments or {}))
        groups = []
    while groups:
        if run_unless_oom(collect_and_build):
            num_done, groups = num_done + 1, groups[1:]
        else:
            groups = _halved(groups)
    shared = gathered({name: (basis.to("cpu"), capture) for name, (basis, capture) in builder.built.items()})
    found = {name: LayerCalibration.of(shared[name][0], builder.vectors.get(name), shared[name][1]) for name in names}
    calibration = Calibration(found, collect_s, time.perf_counter() - started - collect_s)
    return {name: shared[name][0] for name in names}, calibration


def _needs(constructor: str, targets: Mapping[str, Target]) -> frozenset[MomentName]:
    """The moments that the constructor reads; with G also a and d, which the captures need."""
    row = find_constructor(constructor)
    needs = frozenset[MomentName]().union(*(row.needs(target.options) for target in targets.values()))
    return needs | CAPTURE_NEEDS if "cross" in needs else needs


class _Builder:
    """Builds the bases of this rank's layers.

    Attributes:
        owners: The rank that builds each layer's basis, so that each rank has about the same work.
        built: The basis and the capture of each layer that this rank owns.
        vectors: The moments of every layer, without matrices.
    """

    def __init__(self, constructor: str, targets: Mapping[str, Target], progress: Progress) -> None:
        self.constructor, self.targets, self.progress = constructor, targets, progress
        shapes = {name: target.layer.shape for name, target in targets.items()}
        work_of_svd = {name: m * n * min(m, n) for name, (m, n) in shapes.items()}
        self.owners = assign_owners(work_of_svd, num_ranks())
        self.built: dict[str, tuple[LayerBasis, Capture | None]] = {}
        self.vectors: dict[str, LayerMoments] = {}

    def build(self, group: Sequence[str], moments: dict[str, LayerMoments]) -> None:
        """Build a group's bases; each layer's moments are removed from ``moments`` after use."""
        num_to_build = list(self.owners.values()).count(own_rank())
        with raise_on_any_rank():
            for name in group:
                target = self.targets[name]
                layer = replace(target.layer, moments=moments.pop(name, None))
                if self.owners[name] == own_rank():
                    _require_tokens(layer, target.options.r)
                    basis = build_basis(self.constructor, layer, target.options)
                    self.built[name] = basis, capture_or_none(layer.moments, basis)
                    self.progress("bases", len(self.built), num_to_build)
                if layer.moments is not None:
                    self.vectors[name] = layer.moments.without_matrices()


def _require_tokens(layer: LayerData, rank: int) -> None:
    """Refuse a basis with more directions than the tokens that it is made of."""
    if layer.moments is not None and layer.moments.num_tokens < rank:
        raise CalibrationError(
            f"A basis of rank {rank} is made of {rank} tokens or more, but layer {layer.name!r} received "
            f"{layer.moments.num_tokens}. Calibrate on more rows, or take a smaller rank."
        )


def _halved(groups: Sequence[list[str]]) -> list[list[str]]:
    """Split the groups into groups of at most half the size of the first."""
    size = len(groups[0])
    if size == 1:
        raise CalibrationError(
            f"There is no memory to calibrate layer {groups[0][0]!r} even alone. Calibrate on smaller batches or "
            'shorter text, or with options=CalibrationOptions(stats_device="cpu").'
        )
    half = -(-size // 2)
    warnings.warn(
        f"Out of memory with {size} layers in a pass: calibration goes on with {half} at a time, which takes more "
        "passes and gives the same bases. Start with CalibrationOptions(group_size=...) to spare the failed pass.",
        stacklevel=4,
    )
    return [group[i : i + half] for group in groups for i in range(0, len(group), half)]
