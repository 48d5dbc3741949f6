"""The figure of the demo: every method on every task, beside the base model and chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from frozencore.lab.reports.figures.style import BLACK, COLOURS, GREY, plt, save_figure


def accuracy_figure(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """One panel a task: accuracy of every method with its standard error; the base model and chance as lines."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    order = list(reversed(mean_accuracy(records)))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(2.2 + 2.3 * len(tasks), 0.9 + 0.32 * len(order)), sharey=True, squeeze=False
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        _panel(axis, {record["method"]: record for record in records if record["task"] == task}, order)
        axis.set_title(task, fontsize=10)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    lines = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="lower right", ncols=len(lines), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    save_figure(figure, path)


def mean_accuracy(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean accuracy over tasks by method, best first.

    Raises:
        ValueError: A method lacks a task that another one has: such means do not compare.
    """
    tasks = {record["task"] for record in records}
    means = {}
    for method in dict.fromkeys(record["method"] for record in records):
        own = {record["task"]: record["accuracy"] for record in records if record["method"] == method}
        if own.keys() != tasks:
            raise ValueError(f"{method} lacks the tasks {sorted(tasks - own.keys())}.")
        means[method] = sum(own.values()) / len(own)
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _panel(axis: Axes, by_method: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> None:
    rows = [by_method[method] for method in order]
    accuracy = [100 * row["accuracy"] for row in rows]
    error = [100 * row["standard_error"] for row in rows]
    colours = [COLOURS.get(method, GREY) for method in order]
    axis.barh(range(len(order)), accuracy, xerr=error, color=colours, height=0.7, error_kw={"lw": 0.8})
    axis.set_yticks(range(len(order)), order, fontsize=9)
    axis.axvline(100 * rows[0]["accuracy_before"], color=BLACK, lw=1, ls="--", label="base model")
    if rows[0]["chance"] is not None:
        axis.axvline(100 * rows[0]["chance"], color=BLACK, lw=1, ls=":", label="chance")
    axis.set_xlim(0, 100)
    axis.set_xlabel("accuracy, %", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
