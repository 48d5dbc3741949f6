"""The cost of each method of a study (paper, "Resource accounting"): values and bytes, measured phases, projections.

The time of a run is projected as ``initialisation + steps x median step``, not measured as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from frozencore.tune.methods import METHODS
from frozencore.tune.record import TunedRecord
from frozencore_lab.campaign.plan import Axes
from frozencore_lab.campaign.results import FinalRun, StudyResults
from frozencore_lab.campaign.spec import DEFAULT_METHOD
from frozencore_lab.reports.pivot import by_axes, varied_axes
from frozencore_lab.reports.sheet import Sheet, SheetCell, column_name, label, missing, number, titled

HELD = "State held while training, at its peak: gradients and optimiser states."


@dataclass(frozen=True)
class Phases:
    """The times of a run: calibration or a weight SVD (0 without such a phase), and the median step if measured."""

    initialisation_s: float
    step_s: float | None
    num_steps: int

    @property
    def training_s(self) -> float | None:
        return None if self.step_s is None else self.num_steps * self.step_s

    @property
    def total_s(self) -> float | None:
        return None if self.training_s is None else self.initialisation_s + self.training_s

    def ahead(self, other: Phases) -> tuple[float, float] | None:
        """The range of steps in which this projected total is below the other's.

        ``(70, inf)``: from 70 steps on; ``(0, inf)``: always; ``(inf, inf)``: never; ``(0, 50)``: up to 50 steps.
        None if a step was not measured.
        """
        if self.step_s is None or other.step_s is None:
            return None
        later, saved = self.initialisation_s - other.initialisation_s, other.step_s - self.step_s
        if later >= 0 and saved <= 0:
            return math.inf, math.inf
        if later <= 0 and saved >= 0:
            return 0.0, math.inf
        return (later / saved, math.inf) if saved > 0 else (0.0, later / saved)


@dataclass(frozen=True)
class Cost:
    """The cost of one method, from its records; ``kinds`` counts the values that train at once by kind, if known."""

    name: str
    records: Sequence[TunedRecord]
    phases: Phases
    kinds: Mapping[str, int | None]

    def largest(self, value: str) -> int:
        """The largest of the records' values with this name."""
        return max(getattr(record, value) for record in self.records)


@dataclass(frozen=True)
class Costs:
    """The costs of one model (and of one task, in a study that runs alone), and the reference."""

    title: str
    group: Axes
    costs: tuple[Cost, ...]
    reference: Cost | None


def study_costs(results: StudyResults) -> list[Costs]:
    """Costs by method and every other varied axis except task and seed; one entry for each model.

    A study that runs alone on its machine is split by task; other studies are pooled over their tasks.
    """
    apart, names = ("model", "task") if results.study.kind.is_alone else ("model",), varied_axes(results)
    report, axes = results.study.report, results.study.axes
    wanted = report.reference or DEFAULT_METHOD
    tuned = [run for run in results.runs if isinstance(run.record, TunedRecord)]
    found = []
    for (key,), runs in by_axes(tuned, apart).items():
        group = {axis: value for axis, value in zip(apart, key, strict=True) if len(axes[axis]) > 1}
        costs = {line: _cost(column_name(names, line), own) for (line,), own in by_axes(runs, names).items()}
        reference = costs.get((wanted,)) if report.columns == ("method",) and names == ["method"] else None
        found.append(Costs(titled(results.study.title, group), group, tuple(costs.values()), reference))
    return found


def _cost(name: str, runs: Sequence[FinalRun]) -> Cost:
    records = [run.record for run in runs if isinstance(run.record, TunedRecord)]
    first, steps = records[0], [s for record in records if (s := record.resources.step_s) is not None]
    method = METHODS.get(first.method)
    initialises = method is None or method.has_bases or method.changes_base  # reads data or weights before training
    phases = Phases(
        median(record.calibration_s for record in records) if initialises else 0.0,
        median(steps) if steps else None,
        round(median(record.training.num_steps for record in records)),
    )
    return Cost(name or first.method, records, phases, _kinds(first, method.trains if method else ()))


def _kinds(record: TunedRecord, kinds: Sequence[str]) -> dict[str, int | None]:
    """Values that train at once by kind, if the method has one kind, or magnitudes beside factors."""
    trained, magnitudes = record.num_trainable, record.resources.magnitude_parameters
    if len(kinds) == 1:
        return {kinds[0]: trained}
    if set(kinds) == {"factors", "magnitudes"}:
        return {"factors": trained - magnitudes, "magnitudes": magnitudes}
    return dict.fromkeys(kinds)


def state_sheet(costs: Costs, name: str) -> Sheet:
    """A sheet of values at once, in all and by kind, the training state, saved bytes, and the model's size."""
    kinds = dict.fromkeys(("core", "factors", "magnitudes", *(kind for cost in costs.costs for kind in cost.kinds)))
    unknown, lines = "the record does not tell them apart", []
    measured = any(record.alignment is not None for cost in costs.costs for record in cost.records)
    for cost in costs.costs:
        first = cost.records[0]
        norms = [record.alignment.gradient for record in cost.records if record.alignment is not None]
        gradient = missing("no bases, or bases that were made without the gradient G", is_undefined=True)
        if len(norms) == len(cost.records):
            gradient = SheetCell(f"{fmean(norms):.3g}", value=fmean(norms))
        lines.append({
            "method": label(cost.name),
            "values": number(first.num_trainable, 0),
            **{kind: number(cost.kinds.get(kind, 0), 0, reason=unknown) for kind in kinds},
            "state held": bytes_cell(cost.largest("state_held_bytes")),
            "saved": bytes_cell(cost.largest("saved_bytes")),
            "without bases": bytes_cell(first.resources.saved_bytes_without_bases),
            "base model": bytes_cell(first.model_bytes),
            **({"‖PᵀGQ‖": gradient} if measured else {}),
        })  # fmt: skip
    note = (
        f"Values that train at once, also by kind, and values trained in all. {HELD} Saved: the adapter's files, also "
        "without bases that can be made again from the base model and the calibration rows, and the base model's own "
        "weights beside them."
    )
    if measured:
        note += " ‖PᵀGQ‖: the norm of the cores' gradient on the calibration rows, before training; the mean over runs."
    return Sheet.of(name, f"{costs.title}: trained, held and saved", note, lines)


def time_sheet(costs: Costs, name: str, *, alone: bool) -> Sheet:
    """A sheet of measured phases, projected totals, and the break-even of the reference's initialisation."""
    lines = []
    for cost in costs.costs:
        phases, initial = cost.phases, cost.phases.initialisation_s
        line = {
            "method": label(cost.name),
            "init. or calib.": seconds_cell(initial) if initial else SheetCell("none", value=0.0),
            "step": seconds_cell(phases.step_s),
            "steps": number(phases.num_steps, 0),
            "training": seconds_cell(phases.training_s),
            "total": seconds_cell(phases.total_s),
            "init. share": _share(phases),
            "peak memory": bytes_cell(cost.largest("peak_memory_bytes")),
        }
        if costs.reference is not None:
            is_reference = cost is costs.reference
            line["break-even"] = SheetCell("reference") if is_reference else _break_even(costs.reference.phases, phases)
        lines.append(line)
    note = (
        "Training and total are projected from the median step; times are medians over runs, memory the largest of a "
        "run's process, or of its GPUs."
    )
    if costs.reference is not None:
        note += f" Break-even: steps after which {costs.reference.name}'s total is the lower one."
    runs = sorted({len(cost.records) for cost in costs.costs})
    note += f" Runs each: {runs[0]}." if len(runs) == 1 else f" Runs each: {runs[0]} to {runs[-1]}."
    if not alone:
        note += " These runs shared calibration passes and the machine with others: a profile study measures alone."
    return Sheet.of(name, f"{costs.title}: phases and projected time", note, lines)


def _share(phases: Phases) -> SheetCell:
    if not phases.total_s or not phases.initialisation_s:
        return missing("nothing is made before the first step", is_undefined=not phases.initialisation_s)
    share = phases.initialisation_s / phases.total_s
    return SheetCell(f"{100 * share:.0f} %", value=share)


def _break_even(reference: Phases, other: Phases) -> SheetCell:
    span = reference.ahead(other)
    if span is None:
        return missing("no step was measured")
    start, end = span
    if math.isinf(start):
        return SheetCell("never", value=math.inf)
    if start == 0:
        return SheetCell("always" if math.isinf(end) else f"up to {end:,.0f}", value=0.0)
    return SheetCell(f"{start:,.0f}", value=start)


def seconds_cell(value: float | None) -> SheetCell:
    if value is None:
        return missing("not measured")
    if value >= 10:
        return SheetCell(f"{value / 60:.1f} min" if value >= 120 else f"{value:.1f} s", value=value)
    return SheetCell(f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms", value=value)


def bytes_cell(value: int | None) -> SheetCell:
    """A cell of bytes in decimal units, like file sizes and the paper's GB."""
    if value is None:
        return missing("not recorded")
    power = max(0, min(3, (len(str(abs(value))) - 1) // 3))
    shown = f"{value / 1000**power:.2f} {('B', 'kB', 'MB', 'GB')[power]}" if power else f"{value} B"
    return SheetCell(shown, value=value)
