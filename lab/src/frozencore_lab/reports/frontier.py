"""Held-out loss against the number of trained values, at once and in all, over several studies of one campaign.

Each study is a family, split by the values of its further axes, such as method or learning rate. The axes that set the
number of trained values, such as rank and budget, give the points of a family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, stdev
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from frozencore.tune.figure_style import plain_ticks
from frozencore.tune.run.record import TunedRecord
from frozencore_lab.campaign.results import CampaignResults
from frozencore_lab.reports.canvas import CYCLE, DASHES, MARKERS, panels, shared_legend, styled
from frozencore_lab.reports.document import Drawing, Section, Table
from frozencore_lab.reports.labels import column_name
from frozencore_lab.reports.sheet import Sheet, SheetCell, label, missing, number, signed
from frozencore_lab.reports.statistics import COVERAGE
from frozencore_lab.reports.tables.costs import HELD, bytes_cell, largest, seconds_cell
from frozencore_lab.reports.tables.pivot import by_axes, varied_axes

SIZES = ("rank", "rank_budget", "layers")
"""Axes that set the number of trained values: a family's points differ in them."""
ValueCount = Literal["at_once", "in_all"]
COUNTS: dict[ValueCount, str] = {"at_once": "values at once", "in_all": "values in all"}
"""The names of the two counts of trained values in reports."""
NAME, TITLE = "frontier", "Loss by trained values"
DECIMALS, MOST_IN_A_ROW = 3, 3
NEARLY = math.log(1.05)


@dataclass(frozen=True)
class FrontierPoint:
    """One size of one family in one panel, over seeds.

    Attributes:
        family: The study, and the values of its axes that do not set the size.
        size: The shown values of its size axes.
        panel: The task, with the model if there are several.
        records: The records of the finished seeds.
        losses: Held-out loss of each seed, in nats per token; empty if a seed is not finished.
    """

    family: str
    size: str
    panel: str
    records: tuple[TunedRecord, ...]
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        return mean(self.losses)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the mean over seeds, by Student's t; None for one seed."""
        count = len(self.losses)
        if count < 2:
            return None
        return float(stats.t.ppf((1 + COVERAGE) / 2, count - 1)) * stdev(self.losses) / math.sqrt(count)

    def trained(self, count: ValueCount) -> int:
        """The number of trained values, averaged over the finished seeds; 0 if there are none."""
        return round(mean(getattr(one, f"values_{count}") for one in self.records)) if self.records else 0


def frontier_points(results: CampaignResults) -> list[FrontierPoint]:
    """The points of the studies that the campaign draws together, including points without a loss."""
    studies = [study for name in results.campaign.frontier for study in results.studies if study.name == name]
    several = len({model for study in studies for model in study.study.axes["model"]}) > 1
    panel_axes = ("task", "model") if several else ("task",)
    found = []
    for study in studies:
        further = [axis for axis in varied_axes(study) if axis not in SIZES]
        sizes = [axis for axis in study.study.axes if axis in SIZES]
        for (family, size, panel), runs in by_axes(study.runs, further, sizes, panel_axes).items():
            records = [run.record for run in runs if isinstance(run.record, TunedRecord)]
            known = [(one, one.held_out_loss) for one in records if one.held_out_loss is not None]
            losses = tuple(loss for _, loss in known) if len(known) == len(runs) else ()
            title = "" if further == ["method"] else study.study.title.partition(",")[0]
            found.append(
                FrontierPoint(
                    ", ".join(filter(None, (title, column_name(further, family)))), column_name(sizes, size),
                    column_name(panel_axes, panel), tuple(one for one, _ in known), losses,
                )
            )  # fmt: skip
    return found


def frontier_sheet(points: Sequence[FrontierPoint]) -> Sheet:
    """A line for each size of each family: values at once and in all, the loss in every panel, the cost."""
    lines: dict[tuple[str, str], dict[str, FrontierPoint]] = {}
    for point in points:
        lines.setdefault((point.family, point.size), {})[point.panel] = point
    rows = []
    for (family, size), found in lines.items():
        done = [point for point in found.values() if point.records]
        if not done:
            continue
        records = [record for point in done for record in point.records]
        rows.append({
            "family": label(family),
            "size": label(size or "-"),
            "at once": _span({point.trained("at_once") for point in done}),
            "in all": _span({point.trained("in_all") for point in done}),
            **{panel: _loss(found.get(panel)) for panel in dict.fromkeys(point.panel for point in points)},
            "state held": bytes_cell(largest(records, "state_held_bytes")),
            "saved": bytes_cell(largest(records, "saved_bytes")),
            "base model": bytes_cell(largest(records, "model_bytes")),
            "peak memory": bytes_cell(largest(records, "peak_memory_bytes")),
            "training": seconds_cell(median(record.training_s for record in records)),
        })  # fmt: skip
    note = (
        "Nats per token, mean over seeds ± half of its 95 % interval (Student's t). Values that train at once, and "
        f"those trained in all. {HELD} Saved: the adapter's files, beside the base model's own weights. Peak memory "
        "is the largest of the runs, training the median."
    )
    return Sheet.of(NAME, "Held-out loss and cost by trained values", note, rows, num_labels=2)


def _span(counts: set[int]) -> SheetCell:
    low, high = min(counts), max(counts)
    return SheetCell(f"{low:,}" if low == high else f"{low:,} to {high:,}", value=high)


def _loss(point: FrontierPoint | None) -> SheetCell:
    if point is None:
        return missing("not a task of that study", is_undefined=True)
    if not point.losses:
        return SheetCell("-", hint="not every seed is done")
    half = point.half_width
    spread = "" if half is None else f"{half:.{DECIMALS}f}"
    return SheetCell(f"{point.loss:.{DECIMALS}f}", spread=spread, value=point.loss)


def at_equal_values(points: Sequence[FrontierPoint], trained: int, count: ValueCount) -> float | None:
    """Interpolate the loss of a family at a number of values, linearly in the logarithm of the number.

    Args:
        points: The points of one family in one panel.
        count: The kind of count.

    Returns:
        None outside the measured range; a number within 5 % of an end counts as the end.
    """
    known = sorted((math.log(point.trained(count)), point.loss) for point in points)
    at = min(max(math.log(trained), known[0][0]), known[-1][0])
    if abs(at - math.log(trained)) > NEARLY:
        return None
    for (low, below), (high, above) in zip(known, known[1:] or known, strict=False):
        if low <= at <= high:
            return below if high == low else below + (above - below) * (at - low) / (high - low)
    return None


def ahead_sheet(points: Sequence[FrontierPoint], count: ValueCount) -> Sheet | None:
    """Compare the first family with every other at equal values of one count; None if there is one family."""
    families = dict.fromkeys(point.family for point in points if point.losses)
    if len(families) < 2:
        return None
    first, *others = families
    lines = []
    for point in points:
        if point.family != first or not point.losses:
            continue
        trained = point.trained(count)
        line = {"task": label(point.panel), COUNTS[count]: number(trained, 0), first: _loss(point)}
        for family in others:
            own = [one for one in points if one.family == family and one.panel == point.panel and one.losses]
            there = at_equal_values(own, trained, count) if own else None
            line[family] = (
                missing("no such number of values was trained", is_undefined=True)
                if there is None
                else signed(point.loss - there, DECIMALS)
            )
        lines.append(line)
    note = (
        "The first family's loss minus another's; below zero the first is better. The other's loss is interpolated "
        "between its two nearest sizes, linearly in the logarithm of the number of values."
    )
    name = f"{NAME}-ahead" if count == "at_once" else f"{NAME}-ahead-in-all"
    return Sheet.of(name, f"{first} against the others at equal {COUNTS[count]}", note, lines)


@styled
def frontier_panels(points: Sequence[FrontierPoint]) -> Figure:
    """Draw two panels for each of at most three tasks, a line for each family, with intervals over seeds.

    Loss over values at once is above, over values in all below; a single task has its two panels side by side. The two
    panels of a task have the same scales.
    """
    tasks, families = (list(dict.fromkeys(names)) for names in zip(*((p.panel, p.family) for p in points), strict=True))
    across = min(len(tasks), MOST_IN_A_ROW)
    figure, axes = panels(2 * across * math.ceil(len(tasks) / across), 3.0, most=2 if len(tasks) == 1 else across)
    for axis in axes:
        axis.set_visible(False)
    for place, task in enumerate(tasks):
        row, column = divmod(place, across)
        above = 2 * row * across + column
        both = axes[above], axes[above + across]
        for axis, count in zip(both, COUNTS, strict=True):
            _panel(axis, [point for point in points if point.panel == task and point.losses], count, families)
            axis.set_title(task)
        both[0].sharex(both[1])
        both[0].sharey(both[1])
    figure.supylabel("held-out loss, nats per token")
    shared_legend(figure, axes, columns=3)
    return figure


def _panel(axis: Axes, points: Sequence[FrontierPoint], count: ValueCount, families: Sequence[str]) -> None:
    """Draw every family's losses on one task against one of the two counts."""
    axis.set_visible(True)
    for place, family in enumerate(families):
        own = sorted((p for p in points if p.family == family), key=lambda point: point.trained(count))
        again = place // len(CYCLE)  # colours repeat with another marker and dash
        axis.errorbar(
            [point.trained(count) for point in own], [point.loss for point in own],
            yerr=[point.half_width or 0.0 for point in own], label=family, color=CYCLE[place % len(CYCLE)],
            marker=MARKERS[(place + again) % len(MARKERS)], ls=DASHES[again % len(DASHES)],
        )  # fmt: skip
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.set_xlabel(COUNTS[count])
    axis.grid()


def frontier_section(results: CampaignResults) -> Section | None:
    """The section of loss against values at once and in all, as a figure and as tables.

    None if no study is named, or no run is finished.
    """
    points = frontier_points(results)
    if not any(point.losses for point in points):
        return None
    runs = tuple(run for study in results.studies if study.name in results.campaign.frontier for run in study.runs)
    alt = f"{TITLE}: held-out loss against values at once and in all"
    ahead = (ahead_sheet(points, count) for count in COUNTS)
    main = [Table(frontier_sheet(points)), *(Table(sheet) for sheet in ahead if sheet is not None)]
    return Section(NAME, TITLE, "", runs, tuple(main), (), (Drawing(NAME, alt, partial(frontier_panels, points)),))
