"""The criterion against the outcome: correlations with their intervals, and the points themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

from matplotlib.figure import Figure

from frozencore.cli.figure_style import BLACK, BLUE, NAVY, method_colour, plt
from frozencore.tune.methods import method_name
from frozencore_lab.reports.tables.criterion import OUTCOMES, STATISTICS, Point, correlate

MARKERS = "osD^vPX*<>hp"
MOST_IN_A_ROW = 4
SHOWN = "‖PᵀGQ‖, share"


def correlation_intervals(points: Sequence[Point]) -> Figure:
    """ρ within tasks of every statistic with either outcome, with its interval."""
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    styles = {"held-out loss": (NAVY, "o", 0.14), "accuracy": (BLUE, "s", -0.14)}
    for outcome in OUTCOMES:
        colour, marker, shift = styles[outcome]
        for place, statistic in enumerate(reversed(STATISTICS)):
            found = correlate(points, statistic.title, outcome)
            if found is None:
                continue
            axis.plot((found.low, found.high), (place + shift,) * 2, color=colour, lw=1.4)
            axis.plot(found.rho, place + shift, marker, color=colour, ms=6)
        axis.plot([], [], marker, color=colour, label=f"with the {outcome}")
    axis.axvline(0, color=BLACK, lw=0.8)
    axis.set_xlim(-1.03, 1.03)
    axis.set_ylim(-0.6, len(STATISTICS) - 0.4)
    axis.set_xticks((-1, -0.5, 0, 0.5, 1))
    axis.set_yticks(range(len(STATISTICS)), [statistic.title for statistic in reversed(STATISTICS)], fontsize=8)
    axis.set_xlabel("Spearman's ρ within tasks, 95 % interval", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", lw=0.4, color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 1.12), ncols=2)
    figure.tight_layout()
    return figure


def criterion_scatter(points: Sequence[Point]) -> Figure:
    """A panel a task: held-out loss against the share of the gradient that reaches the core."""
    tasks = list(dict.fromkeys(point.task for point in points))
    methods = list(dict.fromkeys(point.method for point in points))
    markers = dict(zip(methods, cycle(MARKERS), strict=False))
    across = min(len(tasks), MOST_IN_A_ROW)
    down = math.ceil(len(tasks) / across)
    size = 1.4 + 2.7 * across, 0.4 + 2.5 * down
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis, task in zip(axes.flat, tasks, strict=False):
        own = [point for point in points if point.task == task]
        for method in methods:
            pairs = [(p.values[SHOWN], p.outcomes["held-out loss"]) for p in own if p.method == method]
            known = [(x, y) for x, y in pairs if x is not None and y is not None]
            axis.plot(
                [x for x, _ in known], [y for _, y in known], markers[method], color=method_colour(method), ms=4.5,
                alpha=0.8, label=method_name(method), markeredgewidth=0,
            )  # fmt: skip
        found = correlate(own, SHOWN, "held-out loss")
        axis.set_title(task + (f", ρ = {found.rho:+.2f}" if found else ""), fontsize=9, loc="left", parse_math=False)
        axis.tick_params(labelsize=7)
        axis.locator_params(axis="x", nbins=4)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    figure.supxlabel("share of the gradient in the span, ‖PᵀGQ‖ / ‖G‖", fontsize=8)
    figure.supylabel("held-out loss, nats per token", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside right center")
    return figure
