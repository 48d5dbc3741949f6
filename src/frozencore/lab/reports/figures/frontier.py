"""Held-out loss against trained values: a panel a task, a line a family, intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from frozencore.lab.reports.figures.study import CYCLE, DASHES, MARKERS
from frozencore.lab.reports.figures.style import plt
from frozencore.lab.reports.tables.frontier import FrontierPoint, panels_of

MOST_IN_A_ROW = 3


def frontier_panels(points: Sequence[FrontierPoint]) -> Figure:
    """Both directions share nothing between panels but the families' colours, markers and dashes."""
    panels = panels_of(points)
    across = min(len(panels), MOST_IN_A_ROW)
    down = math.ceil(len(panels) / across)
    lines = math.ceil(len({point.family for point in points}) / across)
    size = 0.3 + 2.7 * across, 0.3 + 2.6 * down + 0.2 * lines
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    several = len({panel.model for panel in panels}) > 1
    for axis, panel in zip(axes.flat, panels, strict=False):
        for family in sorted({point.family for point in points if point.losses}):
            own = [point for point in points if point.family == family and point.panel == panel and point.losses]
            own.sort(key=lambda point: point.trained)
            number, name = family
            again = number // len(CYCLE)  # colours come again with another marker and dash
            axis.errorbar(
                [point.trained for point in own], [point.loss for point in own],
                yerr=[point.half_width or 0.0 for point in own], label=name, color=CYCLE[number % len(CYCLE)],
                marker=MARKERS[(number + again) % len(MARKERS)], ls=DASHES[again % len(DASHES)], ms=5, lw=1.4,
                capsize=2,
            )  # fmt: skip
        axis.set_xscale("log")
        title = f"{panel.name}, {panel.model}" if several else panel.name
        axis.set_title(title, fontsize=9, loc="left", parse_math=False)
        axis.tick_params(labelsize=8)
        axis.grid(lw=0.4, color="#dddddd")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("trained values", fontsize=8)
    figure.supylabel("held-out loss, nats per token", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside upper center", ncols=across)
    return figure
