"""The calibration in a run's record: its size and time, and how much of the moments the bases capture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from frozencore.maths.capture import METRIC, Capture
from frozencore.tune.record_part import Count, Finite, RecordPart, rounded

if TYPE_CHECKING:
    from frozencore.calibration.calibrate import Calibration

NUM_LEADING = 4  # recorded singular values of a layer, beside the last
LAYER_NUMBERS = (
    "J", "energy", "gradient", "gradient_total", "effective_rank", "participation", "input_spread", "error_spread",
)  # fmt: skip


class CalibrationSummary(RecordPart):
    """The calibration over all layers; a median that is not finite is None."""

    collect_s: float
    build_s: float
    num_layers: Count
    num_tokens: Count
    smallest_effective_rank: Count
    median_spread: dict[str, Finite]

    @classmethod
    def of(cls, calibration: Calibration) -> Self:
        layers, spreads = list(calibration.layers.values()), {}
        for name in ("input_spread", "error_spread"):
            known = [value for layer in layers if (value := getattr(layer, name)) is not None]
            spreads[name] = median(known) if known else None
        return cls(
            collect_s=calibration.collect_s,
            build_s=calibration.build_s,
            num_layers=len(layers),
            num_tokens=max(layer.num_tokens for layer in layers),
            smallest_effective_rank=min(layer.effective_rank for layer in layers),
            median_spread=spreads,
        )


class AlignmentOfLayers(RecordPart):
    """The numbers of each layer (:class:`frozencore.maths.capture.Capture`), in the order of ``name``.

    Of its values, ``leading`` are the first four and ``last`` is the r-th.
    """

    name: tuple[str, ...]
    J: tuple[float, ...]
    energy: tuple[float, ...]
    gradient: tuple[float, ...]
    gradient_total: tuple[float, ...]
    leading: tuple[tuple[float, ...], ...]
    last: tuple[float, ...]
    effective_rank: tuple[Count, ...]
    participation: tuple[float, ...]
    input_spread: tuple[Finite, ...]
    error_spread: tuple[Finite, ...]


class Alignment(RecordPart):
    """The share of the calibration rows' moments G, a, d that the bases capture before training.

    All runs use the same metric, diagonal on both sides with this relative ``damping``, so that runs can be compared.

    Attributes:
        J: Sum over the layers; the local model predicts that a step η lowers the loss by η/2 times J.
        J_share: J over the sum of all energy.
        gradient: ``‖PᵀGQ‖_F`` over all layers; ``gradient_share`` is its ratio to ``‖G‖_F``.
        leading, last, effective_rank, participation, input_spread, error_spread: Medians over the layers.
    """

    damping: float
    J: float
    J_share: float
    gradient: float
    gradient_share: float
    leading: tuple[float, ...]
    last: float
    effective_rank: float
    participation: float
    input_spread: Finite
    error_spread: Finite
    layers: AlignmentOfLayers

    @classmethod
    def of(cls, captures: Mapping[str, Capture]) -> Self | None:
        """The alignment from each layer's capture; None without layers."""
        if not captures:
            return None
        layers = list(captures.values())
        numbers: dict[str, list[Any]] = {name: [getattr(layer, name) for layer in layers] for name in LAYER_NUMBERS}
        numbers["last"] = [layer.values[-1] for layer in layers]
        leading = [layer.values[:NUM_LEADING] for layer in layers]
        J, energy = math.fsum(numbers["J"]), math.fsum(numbers["energy"])
        gradient, total = math.hypot(*numbers["gradient"]), math.hypot(*numbers["gradient_total"])
        medians = ("last", "effective_rank", "participation", "input_spread", "error_spread")
        return cls(
            damping=METRIC.damping_by_side[0],
            J=J,
            J_share=J / energy if energy else 0.0,
            gradient=gradient,
            gradient_share=gradient / total if total else 0.0,
            leading=tuple(median(values) for values in zip(*leading, strict=False)),
            layers=AlignmentOfLayers.model_validate(
                {
                    "name": tuple(captures),
                    "leading": tuple(map(rounded, leading)),
                    **{name: rounded(values) for name, values in numbers.items()},
                }
            ),
            **{name: median(numbers[name]) for name in medians},
        )


class CalibratedAdapter(RecordPart):
    """How an adapter was made, for the records of runs that train it.

    Attributes:
        calibration: None if the method reads no data.
        alignment: None if it is not known what the bases capture.
        time_s: Seconds of adding and calibrating.
        warnings: The warnings of the calibration, and of a named basis.
    """

    calibration: CalibrationSummary | None
    alignment: Alignment | None
    time_s: float
    warnings: tuple[str, ...]
