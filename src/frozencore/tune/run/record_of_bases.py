"""What the record of a run says of its bases: how they were chosen, their ranks, their pass, what they capture."""

from __future__ import annotations

from frozencore.tune.run.record_parts import Count, Part


class Allocation(Part):
    """A rank budget, in trained values, and the rank of each layer that it was for; 0 is not adapted."""

    budget: Count
    ranks: dict[str, Count]


class CalibrationSummary(Part):
    """The calibration pass over all layers; a median is None where it is not finite."""

    collect_s: float
    build_s: float
    num_layers: Count
    num_tokens: Count
    smallest_effective_rank: Count
    median_spread: dict[str, float | None]


class LayerCriteria(Part):
    """The criterion layer by layer: one entry of every tuple a layer, in the order of ``name``.

    Attributes:
        J: Squared whitened gradient inside the span, ``‖(PᵀDP)^-1/2 PᵀGQ (QᵀAQ)^-1/2‖²_F``.
        energy: ``‖T‖²_F`` of ``T = D^-1/2 G A^-1/2``: what J is a share of.
        gradient, gradient_total: ``‖PᵀGQ‖_F`` and ``‖G‖_F``.
        leading: The first four singular values of what J is the squared norm of; for ``fcca`` they are Σ.
        last: The r-th of them.
        effective_rank: How many of them stand above rounding.
        participation: ``(Σσ²)² / Σσ⁴``: over how many of them J is spread.
        input_spread, error_spread: Maximum over median of a and of d; None where the median is zero.
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
    input_spread: tuple[float | None, ...]
    error_spread: tuple[float | None, ...]


class Criterion(Part):
    """What the bases capture of the moments G, a, d of the run's calibration rows, before any training.

    The metric is one for all runs, both sides in diagonal moments with this relative ``damping``, whatever the bases
    were chosen by: so runs compare.

    Attributes:
        J: Sum over the layers; η/2 of it is the decrease of the loss that the local model promises for a step η.
        J_share: Of the sum of all energy.
        gradient: ``‖PᵀGQ‖_F`` of all layers together, and ``gradient_share`` of ``‖G‖_F``.
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
    input_spread: float | None
    error_spread: float | None
    layers: LayerCriteria
