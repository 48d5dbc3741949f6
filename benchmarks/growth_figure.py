"""The figure of docs/cost.md: six panels, in colours that colour-blind readers can tell apart (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

GREY, BLUE, ORANGE, BLACK = "#999999", "#0072B2", "#E69F00", "#222222"
Rows = Sequence[Mapping[str, Any]]


def over_floor(row: Mapping[str, Any], contestant: str) -> float:
    """Median over the runs of a contestant's step over the floor's in the same round."""
    return median(run[f"{contestant}_s"] / run["floor_s"] for run in row["runs"])


def growth_figure(sweeps: Mapping[str, Rows], names: Mapping[str, str], steps: Mapping[str, Rows], path: Path) -> None:
    """Calibration against each letter, seconds; a step against rank and targets, over its floor.

    Args:
        sweeps: By the word that labels the axis; ``names`` holds the word of each column.
        steps: Rows by ``rank`` and by ``targets``.
    """
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 6))
    columns = {word: name for name, word in names.items()}
    for axis, (word, rows) in zip(axes.flat, sweeps.items(), strict=False):
        _calibration_panel(axis, [row[columns[word]] for row in rows], rows, word)
    _step_panel(axes.flat[4], steps["rank"], "rank")
    _step_panel(axes.flat[5], steps["targets"], "targets")
    for index, axis in enumerate(axes.flat):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        if index in (0, 4):
            axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _calibration_panel(axis: Axes, x: Sequence[int], rows: Rows, word: str) -> None:
    whole = [row["collect_s"] + row["build_s"] for row in rows]
    axis.plot(x, whole, color=ORANGE, marker="o", ms=4, label="calibration, all of it")
    axis.plot(x, [row["collect_s"] for row in rows], color=BLUE, marker="s", ms=3, label="pass with sums")
    axis.plot(x, [row["floor_s"] for row in rows], color=GREY, marker="^", ms=3, label="plain pass (floor)")
    axis.plot(x, [row["build_s"] for row in rows], color=BLACK, marker="v", ms=3, ls=":", label="bases")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    _ticks(axis, x)
    axis.set_title(f"calibration: {word}", fontsize=10)
    axis.set_ylabel("seconds of CPU", fontsize=8)


def _step_panel(axis: Axes, rows: Rows, name: str) -> None:
    x = [row["rank"] for row in rows] if name == "rank" else list(range(len(rows)))
    for contestant, label, colour in (("lora", "LoRA", BLACK), ("frozencore", "frozen core", ORANGE)):
        axis.plot(x, [over_floor(row, contestant) for row in rows], color=colour, marker="o", ms=4, label=label)
    axis.axhline(1, color=GREY, lw=1)
    if name == "rank":
        axis.set_xscale("log", base=2)
        _ticks(axis, x)
    else:
        axis.set_xticks(x, [row["targets"] for row in rows])
    axis.set_title(f"training step: {name}", fontsize=10)
    axis.set_ylabel("over its floor", fontsize=8)


def _ticks(axis: Axes, x: Sequence[int]) -> None:
    axis.set_xticks(x, [str(value) for value in x])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
