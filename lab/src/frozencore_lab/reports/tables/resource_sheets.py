"""Costs as sheets: what is trained and stored, and what a run takes."""

from __future__ import annotations

import math

from frozencore_lab.reports.labels import full_name
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, number
from frozencore_lab.reports.tables.resources import Cost, Costs, ahead

HELD = (
    "State held while training, at its peak: gradients, optimiser states, and what rounds hold (sums of moments, "
    "earlier factors, copies of weights)."
)


def state_sheet(costs: Costs, name: str, title: str) -> Sheet:
    """Values at once, in all and by kind, the state held while training, and what is saved beside the model's size."""
    kinds = dict.fromkeys(("core", "factors", "magnitudes", *(kind for cost in costs.costs for kind in cost.kinds)))
    rows = tuple(
        (
            label(cost.name), number(cost.values_at_once, 0), number(cost.values_in_all, 0),
            *(_kind(cost.kinds.get(kind, 0)) for kind in kinds),
            bytes_cell(cost.state_held_bytes), bytes_cell(cost.saved_bytes),
            bytes_cell(cost.saved_bytes_without_bases), bytes_cell(cost.model_bytes),
        )
        for cost in costs.costs
    )  # fmt: skip
    return Sheet(
        name, f"{_titled(title, costs)}: trained, held and saved",
        f"Values that train at once, also by kind, and values trained in all. {HELD} Saved: the adapter's files, also "
        "without bases that can be made again from the base model and the calibration rows, and the base model's own "
        "weights beside them.",
        ("method", "at once", "in all", *kinds, "state held", "saved", "without bases", "base model"), rows,
    )  # fmt: skip


def time_sheet(costs: Costs, name: str, title: str, *, alone: bool) -> Sheet:
    """Measured phases, the total that they project to, and when the reference has made up for its initialisation.

    Args:
        alone: Whether each run had the machine to itself and took nothing from others, as in a profile.
    """
    headings = ["method", "init. or calib.", "step", "steps", "training", "total", "init. share", "peak memory"]
    rows = [_time_row(cost) for cost in costs.costs]
    note = "Training and total are projected from the median step; times are medians over runs, memory the largest."
    if costs.reference is not None:
        headings.append("break-even")
        rows = [(*row, _break_even(costs.reference, cost)) for row, cost in zip(rows, costs.costs, strict=True)]
        note += f" Break-even: steps after which {costs.reference.name}'s total is the lower one."
    runs = sorted({cost.num_runs for cost in costs.costs})
    note += f" Runs each: {runs[0]}." if len(runs) == 1 else f" Runs each: {runs[0]} to {runs[-1]}."
    if any(cost.memory is None for cost in costs.costs):
        note += " Memory is the largest of a process's whole life, other runs in it included."
    if not alone:
        note += " These runs shared calibration passes and the machine with others: a profile study measures alone."
    return Sheet(name, f"{_titled(title, costs)}: phases and projected time", note, tuple(headings), tuple(rows))


def memory_sheet(costs: Costs, name: str, title: str) -> Sheet | None:
    """What each phase takes beyond what was held before it; None where no record tells phases apart."""
    if all(cost.memory is None for cost in costs.costs):
        return None
    return Sheet(
        name,
        f"{_titled(title, costs)}: peak memory by phase",
        "Held: with the base model loaded and scored, before there was an adapter. Calibration, training, scoring: the "
        "peak of each phase beyond that. Peak: the largest of them, with what was held. The largest over runs.",
        ("method", "held", "calibration", "training", "scoring", "peak"),
        tuple(_memory_row(cost) for cost in costs.costs),
    )


def _memory_row(cost: Cost) -> tuple[SheetCell, ...]:
    memory = cost.memory
    if memory is None:
        return label(cost.name), *[bytes_cell(None)] * 4, bytes_cell(cost.peak_memory_bytes)
    phases = (memory.held, memory.calibration, memory.training, memory.scoring)
    return label(cost.name), *map(bytes_cell, phases), bytes_cell(cost.peak_memory_bytes)


def _titled(title: str, costs: Costs) -> str:
    return ", ".join([title, *(full_name(axis, value) for axis, value in costs.group.items())])


def _time_row(cost: Cost) -> tuple[SheetCell, ...]:
    share = cost.initialisation_share
    first = seconds_cell(cost.initialisation_s) if cost.initialisation_s else SheetCell("none", value=0.0)
    none = SheetCell("n/a", hint="nothing is made before the first step", is_undefined=not cost.initialisation_s)
    return (
        label(cost.name), first, seconds_cell(cost.step_s), number(cost.num_steps, 0),
        seconds_cell(cost.training_s), seconds_cell(cost.total_s),
        none if share is None else SheetCell(f"{100 * share:.0f} %", value=share),
        bytes_cell(cost.peak_memory_bytes),
    )  # fmt: skip


def _break_even(reference: Cost, other: Cost) -> SheetCell:
    if other is reference:
        return SheetCell("reference")
    span = ahead(reference, other)
    if span is None:
        return SheetCell("n/a", hint="no step was measured")
    start, end = span
    if math.isinf(start):
        return SheetCell("never", value=math.inf)
    if start == 0:
        return SheetCell("always" if math.isinf(end) else f"up to {end:,.0f}", value=0.0)
    return SheetCell(f"{start:,.0f}", value=start)


def _kind(count: int | None) -> SheetCell:
    return SheetCell("0", value=0) if count == 0 else number(count, 0, reason="the record does not tell them apart")


def seconds_cell(value: float | None) -> SheetCell:
    if value is None:
        return SheetCell("n/a", hint="not measured")
    if value >= 120:
        shown = f"{value / 60:.1f} min"
    elif value >= 10:
        shown = f"{value:.1f} s"
    else:
        shown = f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"
    return SheetCell(shown, value=value)


def bytes_cell(value: int | None) -> SheetCell:
    """Decimal units, as file sizes and the paper's GB are."""
    if value is None:
        return SheetCell("n/a", hint="not recorded")
    size, units = float(value), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return SheetCell(f"{value} B" if units[0] == "B" else f"{size:.2f} {units[0]}", value=value)
