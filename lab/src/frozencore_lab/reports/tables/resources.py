"""What each method of a study costs (paper, "Resource accounting"): parameters and bytes, measured phases, projections.

A run is projected as ``initialisation + steps x median step``: a projection of phases, not a stopwatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from frozencore.tune.methods import METHODS
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.run.record_parts import Resources
from frozencore_lab.campaign.plan import Axes
from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.reports.labels import full_name

RankAndTargets = tuple[int | None, str]
"""Rank and targets of a run."""
FACTORS = ("factors",)


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes, the largest of some runs: held before there was an adapter, and what each phase took beyond that."""

    held: int
    calibration: int
    training: int
    scoring: int


@dataclass(frozen=True)
class Cost:
    """What one method needs, over the runs of a group.

    Attributes:
        values_at_once, values_in_all: How many train at a moment, and how many were trained and saved.
        kinds: The values that train at a moment by kind (``Method.trains``); None where a record does not tell them
            apart.
        state_held_bytes: The state held while training, at its peak.
        saved_bytes, saved_bytes_without_bases: Of the adapter's files; the latter where bases can be made again.
        model_bytes: The base model's weights as they are loaded.
        initialisation_s: Calibration, or a weight SVD; 0 for methods that have no such phase.
        step_s, num_steps: Medians over the runs.
        peak_memory_bytes: The largest of the runs'.
        memory: By phase; None where a record does not tell phases apart.
    """

    name: str
    values_at_once: int
    values_in_all: int
    kinds: Mapping[str, int | None]
    state_held_bytes: int
    saved_bytes: int
    saved_bytes_without_bases: int | None
    model_bytes: int
    initialisation_s: float
    step_s: float | None
    num_steps: int
    peak_memory_bytes: int
    num_runs: int = 1
    memory: PhaseMemory | None = None

    @property
    def training_s(self) -> float | None:
        return None if self.step_s is None else self.num_steps * self.step_s

    @property
    def total_s(self) -> float | None:
        return None if self.training_s is None else self.initialisation_s + self.training_s

    @property
    def initialisation_share(self) -> float | None:
        return self.initialisation_s / self.total_s if self.total_s and self.initialisation_s else None


@dataclass(frozen=True)
class Costs:
    """The costs of one model (and of one task, in a profile), and which of them the others are compared with."""

    group: Axes
    costs: tuple[Cost, ...]
    reference: Cost | None


def ahead(reference: Cost, other: Cost) -> tuple[float, float] | None:
    """The numbers of steps between which the reference's projected total is below the other's.

    ``(70, inf)``: from 70 steps on; ``(0, inf)``: always; ``(inf, inf)``: never; ``(0, 50)``: up to 50 steps.
    None where a step was not measured.
    """
    if reference.step_s is None or other.step_s is None:
        return None
    later = reference.initialisation_s - other.initialisation_s
    saved = other.step_s - reference.step_s
    if later >= 0 and saved <= 0:
        return math.inf, math.inf
    if later <= 0 and saved >= 0:
        return 0.0, math.inf
    return (later / saved, math.inf) if saved > 0 else (0.0, later / saved)


def study_costs(results: StudyResults) -> list[Costs]:
    """Costs by method and every other axis with several values but task and seed; one entry for each model.

    A profile is kept apart by task; other studies are pooled over their tasks.
    """
    if not results.study.kind.trains:
        return []
    apart = ("model", "task") if results.study.kind.is_alone else ("model",)
    several = [axis for axis, values in results.study.axes.items() if len(values) > 1]
    names = [axis for axis in several if axis not in ("model", "task", "seed")]
    groups: dict[tuple[Value, ...], dict[tuple[Value, ...], list[TunedRecord]]] = {}
    for run in results.runs:
        if isinstance(run.record, TunedRecord):
            group = tuple(run.axes[axis] for axis in apart)
            line = tuple(run.axes[axis] for axis in names)
            groups.setdefault(group, {}).setdefault(line, []).append(run.record)
    return [
        _costs(
            results, {axis: value for axis, value in zip(apart, group, strict=True) if axis in several}, names, lines
        )
        for group, lines in groups.items()
    ]


def _costs(
    results: StudyResults,
    group: Axes,
    names: Sequence[str],
    lines: Mapping[tuple[Value, ...], Sequence[TunedRecord]],
) -> Costs:
    factors = _factor_parameters([record for records in lines.values() for record in records])
    found = {}
    for line, records in lines.items():
        shown = ", ".join(full_name(axis, value) for axis, value in zip(names, line, strict=True))
        found[line] = _cost(shown or records[0].method, records, factors)
    report = results.study.report
    wanted = report.reference or str(RunConfig.model_fields["method"].default)
    reference = None
    if report.columns == ("method",) and names == ["method"]:
        reference = found.get((wanted,))
    return Costs(group, tuple(found.values()), reference)


def _cost(name: str, records: Sequence[TunedRecord], factors: Mapping[RankAndTargets, int]) -> Cost:
    first, resources = records[0], records[0].resources or Resources()
    steps = [record.step_s for record in records if record.step_s is not None]
    return Cost(
        name,
        first.values_at_once,
        first.values_in_all,
        _kinds(first, factors.get(_shape(first))),
        max(record.state_held_bytes for record in records),
        max(record.saved_bytes for record in records),
        resources.saved_bytes_without_bases,
        first.model_bytes,
        median(record.calibration_s for record in records) if _initialises(first) else 0.0,
        median(steps) if steps else None,
        round(median(record.training.num_steps for record in records)),
        max(record.peak_memory_bytes for record in records),
        len(records),
        _phase_memory(records),
    )


def _initialises(record: TunedRecord) -> bool:
    method = METHODS.get(record.method)
    return method is None or method.initialises


def _kinds(record: TunedRecord, factors: int | None) -> dict[str, int | None]:
    """Values that train at a moment by kind, where the method has one kind, or magnitudes beside factors."""
    kinds, trained = _trained_by(record), record.values_at_once
    if len(kinds) == 1:
        return {kinds[0]: trained}
    found: dict[str, int | None] = dict.fromkeys(kinds)
    if set(kinds) == {"factors", "magnitudes"}:
        magnitudes = record.resources.magnitude_parameters if record.resources is not None else None
        if magnitudes is None and factors is not None:
            magnitudes = trained - factors
        if magnitudes is not None:
            found |= {"factors": trained - magnitudes, "magnitudes": magnitudes}
    return found


def _factor_parameters(records: Sequence[TunedRecord]) -> dict[RankAndTargets, int]:
    """What LoRA or PiSSA train at each rank and targets: DoRA's factors are as many."""
    return {_shape(record): record.values_at_once for record in records if _trained_by(record) == FACTORS}


def _trained_by(record: TunedRecord) -> tuple[str, ...]:
    method = METHODS.get(record.method)
    return method.trains if method else ()


def _shape(record: TunedRecord) -> RankAndTargets:
    return record.config.rank, str(record.config.targets)


def _phase_memory(records: Sequence[TunedRecord]) -> PhaseMemory | None:
    peaks = [record.resources.peaks for record in records if record.resources and record.resources.peaks]
    if len(peaks) < len(records):
        return None
    return PhaseMemory(
        held=max(one.held_bytes for one in peaks),
        calibration=max(max(0, one.calibration_bytes - one.held_bytes) for one in peaks),
        training=max(max(0, one.training_bytes - one.held_bytes) for one in peaks),
        scoring=max(max(0, one.scoring_bytes - one.held_bytes) for one in peaks),
    )
