"""The figure of docs/rank-budget.md: held-out loss by learning rate, a line a rank, at a scale of 1 and of 16/r."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

COLOURS = ("#56B4E9", "#0072B2", "#E69F00", "#D55E00")  # Okabe and Ito
Rows = Sequence[Mapping[str, Any]]


def scale_figure(rows: Rows, rates: Mapping[str, Sequence[float]], alpha: float, path: Path) -> None:
    """Two panels for each model and targets, of the same trainings: by the rate that they are worth at a scale of 1,
    and by the rate that they were given at ``alpha / r``.

    Args:
        rows: With the losses at the rates of their model; those of rank budgets are left out.
    """
    plain = [row for row in rows if row["rank"] is not None and row["alpha"] is not None]
    models = list(dict.fromkeys(row["model"] for row in plain))
    targets = list(dict.fromkeys(row["targets"] for row in plain))[::-1]
    figure, axes = plt.subplots(len(models), 2 * len(targets), figsize=(12, 3 * len(models)), squeeze=False)
    for line, model in enumerate(models):
        for number, where in enumerate(targets):
            own = [row for row in plain if (row["model"], row["targets"]) == (model, where)]
            left, right = axes[line][2 * number : 2 * number + 2]
            right.sharey(left)
            for axis, scaled in ((left, False), (right, True)):
                _panel(axis, own, rates[model], alpha, scaled=scaled)
                axis.set_title(f"{model}, {where}, s = {'16/r' if scaled else '1'}", fontsize=9)
    axes[0][0].legend(fontsize=8, frameon=False, title="rank", title_fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("learning rate", fontsize=8)
    for line in axes:
        line[0].set_ylabel("held-out nats a token", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(axis: Axes, rows: Rows, rates: Sequence[float], alpha: float, *, scaled: bool) -> None:
    lowest = [min(loss for loss in row["losses"] if loss is not None) for row in rows]
    height = max(max(lowest) - min(lowest), 0.01)
    for row, colour in zip(sorted(rows, key=lambda row: row["rank"]), COLOURS, strict=False):
        x = [rate if scaled else rate * alpha / row["rank"] for rate in rates]
        points = [(rate, loss) for rate, loss in zip(x, row["losses"], strict=True) if loss is not None]
        best = min(points, key=lambda point: point[1])
        axis.plot(*zip(*points, strict=True), color=colour, lw=1.2, marker="o", ms=3, mfc="white", label=row["rank"])
        axis.plot(*best, color=colour, marker="o", ms=6)
    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(min(lowest) - 0.1 * height, max(lowest) + 0.6 * height)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7)
