"""What a trained value buys: held-out loss against values at once and in all, over several studies of one campaign.

A study is a family; so is each value of its further axes, as a method or a rate. The axes that set how many values
train, as rank and budget, tell the points of a family apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Literal

from scipy import stats

from frozencore.tune.run.record import TunedRecord
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.study_options import Value
from frozencore_lab.reports.labels import column_name, value_name
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, number, signed
from frozencore_lab.reports.statistics.over_tasks import COVERAGE
from frozencore_lab.reports.tables.pivot import Key
from frozencore_lab.reports.tables.resource_sheets import HELD, bytes_cell, seconds_cell

SIZES = ("rank", "rank_budget", "layers")
"""Axes that set how many values are trained: along them a family goes."""
ValueCount = Literal["at_once", "in_all"]
COUNTS: dict[ValueCount, str] = {"at_once": "values at once", "in_all": "values in all"}
"""The two counts of trained values, as reports call them."""
DECIMALS = 3
NEARLY = math.log(1.05)


@dataclass(frozen=True)
class Panel:
    """What points are compared on: a model and a task."""

    model: str
    task: str

    @property
    def name(self) -> str:
        return value_name("task", self.task)


@dataclass(frozen=True)
class FrontierPoint:
    """One size of one family in one panel, over seeds.

    Attributes:
        family: Number of the family among all, and its name.
        size: The values of its size axes, as they are shown.
        at_once, in_all: How many values train at a moment and how many were trained, the means over the seeds that are
            done; 0 where none is.
        losses: Held-out loss of each seed, in nats per token; none where one of them is not done.
    """

    family: tuple[int, str]
    size: str
    panel: Panel
    at_once: int
    in_all: int
    losses: tuple[float, ...]
    records: tuple[TunedRecord, ...]

    @property
    def loss(self) -> float:
        return mean(self.losses)

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval of the mean over seeds, by Student's t; None for one seed."""
        count = len(self.losses)
        if count < 2:
            return None
        return float(stats.t.ppf((1 + COVERAGE) / 2, count - 1)) * stdev(self.losses) / math.sqrt(count)


def frontier_points(results: CampaignResults) -> list[FrontierPoint]:
    """The points of the studies that the campaign draws together, also those of which no loss is known yet."""
    studies = {study.name: study for study in results.studies}
    points: list[FrontierPoint] = []
    families: dict[str, int] = {}
    for name in results.campaign.frontier:
        points += _points_of(studies[name], families)
    return points


def panels_of(points: Sequence[FrontierPoint]) -> list[Panel]:
    """Every panel that has a point, in order."""
    return list(dict.fromkeys(point.panel for point in points))


def _points_of(study: StudyResults, families: dict[str, int]) -> list[FrontierPoint]:
    several = [axis for axis, values in study.study.axes.items() if len(values) > 1]
    further = [axis for axis in several if axis not in ("model", "task", "seed", *SIZES)]
    sizes = [axis for axis in study.study.axes if axis in SIZES]
    grouped: dict[tuple[Key, Key, Panel], list[TunedRecord | None]] = {}
    for run in study.runs:
        key = (
            tuple(run.axes[axis] for axis in further),
            tuple(run.axes[axis] for axis in sizes),
            Panel(str(run.axes["model"]), str(run.axes["task"])),
        )
        grouped.setdefault(key, []).append(run.record if isinstance(run.record, TunedRecord) else None)
    found = []
    for (kind, size, panel), records in grouped.items():
        known = [record for record in records if record is not None and record.held_out_loss is not None]
        family = _family(study, further, kind)
        number_of = families.setdefault(family, len(families))
        losses = tuple(record.held_out_loss for record in known if record.held_out_loss is not None)
        at_once, in_all = (
            round(mean(getattr(record, count) for record in known)) if known else 0
            for count in ("values_at_once", "values_in_all")
        )
        whole = losses if len(known) == len(records) else ()
        shown = column_name(sizes, size)
        found.append(FrontierPoint((number_of, family), shown, panel, at_once, in_all, whole, tuple(known)))
    return found


def _family(study: StudyResults, further: Sequence[str], kind: tuple[Value, ...]) -> str:
    own = column_name(further, kind)
    title = study.study.title.partition(",")[0]
    return own if tuple(further) == ("method",) else ", ".join(filter(None, (title, own)))


def frontier_sheet(points: Sequence[FrontierPoint]) -> Sheet:
    """A line for each size of each family: its values at once and in all, its loss in every panel, what it costs."""
    panels = panels_of(points)
    lines: dict[tuple[tuple[int, str], str], dict[Panel, FrontierPoint]] = {}
    for point in points:
        lines.setdefault((point.family, point.size), {})[point.panel] = point
    rows = []
    for (family, size), found in lines.items():
        records = [record for point in found.values() for record in point.records]
        if not records:
            continue
        done = [point for point in found.values() if point.records]
        rows.append(
            (
                label(family[1]), label(size or "-"),
                _span({point.at_once for point in done}), _span({point.in_all for point in done}),
                *(_loss(found.get(panel)) for panel in panels),
                bytes_cell(max(record.state_held_bytes for record in records)),
                bytes_cell(max(record.saved_bytes for record in records)),
                bytes_cell(max(record.model_bytes for record in records)),
                bytes_cell(max(record.peak_memory_bytes for record in records)),
                seconds_cell(median(record.training_s for record in records)),
            )
        )  # fmt: skip
    models = {panel.model for panel in panels}
    headings = [panel.name if len(models) == 1 else f"{panel.name}, {panel.model}" for panel in panels]
    return Sheet(
        "frontier",
        "Held-out loss and cost by trained values",
        "Nats per token, mean over seeds ± half of its 95 % interval (Student's t). Values that train at once, and "
        f"those trained in all. {HELD} Saved: the adapter's files, beside the base model's own weights. Peak memory "
        "is the largest of the runs, training the median.",
        (
            "family", "size", "at once", "in all", *headings, "state held", "saved", "base model", "peak memory",
            "training",
        ),
        tuple(rows),
        num_labels=2,
    )  # fmt: skip


def _span(counts: set[int]) -> SheetCell:
    low, high = min(counts), max(counts)
    return SheetCell(f"{low:,}" if low == high else f"{low:,} to {high:,}", value=high)


def _loss(point: FrontierPoint | None) -> SheetCell:
    if point is None:
        return SheetCell("n/a", hint="not a task of that study", is_undefined=True)
    if not point.losses:
        return SheetCell("-", hint="not every seed is done")
    half = point.half_width
    spread = "" if half is None else f"{half:.{DECIMALS}f}"
    return SheetCell(f"{point.loss:.{DECIMALS}f}", spread=spread, value=point.loss)


def at_equal_values(points: Sequence[FrontierPoint], trained: int, count: ValueCount) -> float | None:
    """The loss that a family has at a number of values, between its neighbours in the logarithm of their number.

    Args:
        points: Of one family in one panel.
        count: Which number of values that is.

    Returns:
        None outside of the range that was measured; a number within 5 % of its end counts as the end.
    """
    known = sorted((math.log(getattr(point, count)), point.loss) for point in points)
    at = min(max(math.log(trained), known[0][0]), known[-1][0])
    if abs(at - math.log(trained)) > NEARLY:
        return None
    for (low, below), (high, above) in zip(known, known[1:] or known, strict=False):
        if low <= at <= high:
            return below if high == low else below + (above - below) * (at - low) / (high - low)
    return None


def ahead_sheet(points: Sequence[FrontierPoint], count: ValueCount) -> Sheet | None:
    """The first family against every other at equal values of one count; None where there is one family."""
    families = sorted({point.family for point in points if point.losses})
    if len(families) < 2:
        return None
    first, *others = families
    rows = []
    for point in points:
        if point.family != first or not point.losses:
            continue
        trained = getattr(point, count)
        line = [label(point.panel.name), number(trained, 0), _loss(point)]
        for family in others:
            own = [one for one in points if one.family == family and one.panel == point.panel and one.losses]
            there = at_equal_values(own, trained, count) if own else None
            line.append(
                SheetCell("n/a", hint="no such number of values was trained", is_undefined=True)
                if there is None
                else signed(point.loss - there, DECIMALS)
            )
        rows.append(tuple(line))
    return Sheet(
        "frontier-ahead" if count == "at_once" else "frontier-ahead-in-all",
        f"{first[1]} against the others at equal {COUNTS[count]}",
        "Its loss less theirs, which is taken between their neighbouring sizes, straight in the logarithm of the "
        "number of values; below zero it is ahead.",
        ("task", COUNTS[count], first[1], *(name for _, name in others)),
        tuple(rows),
    )
