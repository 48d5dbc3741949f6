"""Make the criterion of a record: how much the bases of a run capture before training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from frozencore.maths.capture import METRIC, Capture
from frozencore.tune.run.record import Criterion, LayerCriteria

NUM_LEADING = 4  # recorded singular values of a layer, beside the last
DIGITS = 6


def criterion_of(captures: Mapping[str, Capture]) -> Criterion | None:
    """Make the criterion from each layer's capture; None without layers."""
    if not captures:
        return None
    layers = list(captures.values())
    leading = [layer.values[:NUM_LEADING] for layer in layers]
    J, energy = math.fsum(layer.J for layer in layers), math.fsum(layer.energy for layer in layers)
    gradient, total = _norm(layer.gradient for layer in layers), _norm(layer.gradient_total for layer in layers)
    return Criterion(
        damping=METRIC.damping_by_side[0],
        J=J,
        J_share=J / energy if energy else 0.0,
        gradient=gradient,
        gradient_share=gradient / total if total else 0.0,
        leading=tuple(median(values) for values in zip(*leading, strict=False)),
        last=median(layer.values[-1] for layer in layers),
        effective_rank=median(layer.effective_rank for layer in layers),
        participation=median(layer.participation for layer in layers),
        input_spread=finite_or_none(median(layer.input_spread for layer in layers)),
        error_spread=finite_or_none(median(layer.error_spread for layer in layers)),
        layers=LayerCriteria(
            name=tuple(captures),
            J=_short(layer.J for layer in layers),
            energy=_short(layer.energy for layer in layers),
            gradient=_short(layer.gradient for layer in layers),
            gradient_total=_short(layer.gradient_total for layer in layers),
            leading=tuple(_short(values) for values in leading),
            last=_short(layer.values[-1] for layer in layers),
            effective_rank=tuple(layer.effective_rank for layer in layers),
            participation=_short(layer.participation for layer in layers),
            input_spread=_spreads([layer.input_spread for layer in layers]),
            error_spread=_spreads([layer.error_spread for layer in layers]),
        ),
    )


def _norm(parts: Iterable[float]) -> float:
    return math.hypot(*parts)


def _short(values: Iterable[float]) -> tuple[float, ...]:
    """Round to the digits that a comparison of layers needs, because a record may have hundreds of layers."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)


def _spreads(values: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(finite_or_none(value) for value in _short(values))


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
