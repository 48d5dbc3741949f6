"""Held-out loss against values at once and in all: two panels a task, a line a family, intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from frozencore.cli.figure_style import plain_ticks, plt
from frozencore_lab.reports.figures.study import CYCLE, DASHES, MARKERS
from frozencore_lab.reports.tables.frontier import COUNTS, FrontierPoint, Panel, ValueCount, panels_of

MOST_IN_A_ROW = 3


def frontier_panels(points: Sequence[FrontierPoint]) -> Figure:
    """The tasks beside one another, at most three; over values at once above, over values in all below.

    One task alone has its two panels side by side. The two panels of a task have the same scales.
    """
    tasks = panels_of(points)
    across = min(len(tasks), MOST_IN_A_ROW)
    down = math.ceil(len(tasks) / across)
    shape = (1, 2) if len(tasks) == 1 else (2 * down, across)
    lines = math.ceil(len({point.family for point in points}) / shape[1])
    size = 0.3 + 2.7 * shape[1], 0.3 + 2.6 * shape[0] + 0.2 * lines
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    several = len({task.model for task in tasks}) > 1
    for axis in axes.flat:
        axis.set_visible(False)
    for number, task in enumerate(tasks):
        row, column = divmod(number, across)
        both = axes[0] if len(tasks) == 1 else axes[2 * row : 2 * row + 2, column]
        for axis, count in zip(both, COUNTS, strict=True):
            _panel(axis, points, task, count, f"{task.name}, {task.model}" if several else task.name)
        both[0].sharex(both[1])
        both[0].sharey(both[1])
    figure.supylabel("held-out loss, nats per token", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside upper center", ncols=shape[1])
    return figure


def _panel(axis: Axes, points: Sequence[FrontierPoint], task: Panel, count: ValueCount, title: str) -> None:
    """Every family's losses on one task against one of the two counts."""
    axis.set_visible(True)
    for family in sorted({point.family for point in points if point.losses}):
        own = [point for point in points if point.family == family and point.panel == task and point.losses]
        own.sort(key=lambda point: getattr(point, count))
        number, name = family
        again = number // len(CYCLE)  # colours come again with another marker and dash
        axis.errorbar(
            [getattr(point, count) for point in own], [point.loss for point in own],
            yerr=[point.half_width or 0.0 for point in own], label=name, color=CYCLE[number % len(CYCLE)],
            marker=MARKERS[(number + again) % len(MARKERS)], ls=DASHES[again % len(DASHES)], ms=5, lw=1.4, capsize=2,
        )  # fmt: skip
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.set_title(title, fontsize=9, loc="left", parse_math=False)
    axis.set_xlabel(COUNTS[count], fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(lw=0.4, color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)
