"""A panel for each row of a table: every column beside the others, the untouched model and chance."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from frozencore.cli.figure_style import BLACK, plt
from frozencore.tune.run.record import TunedRecord
from frozencore_lab.reports.tables.averages import column_averages
from frozencore_lab.reports.tables.measures import ACCURACY
from frozencore_lab.reports.tables.pivot import Key, Pivot


def row_panels(pivot: Pivot, colour: Callable[[Key], str]) -> Figure:
    """Bars with the standard deviation over the seeds, or the standard error of the evaluated rows for a single seed;
    columns in the order of their means, the best on top.
    """
    means = {column: average.value for column, average in column_averages(pivot).items()}
    order = sorted(means, key=lambda column: means[column] or 0.0, reverse=pivot.measure.lower_is_better)
    figure, axes = plt.subplots(
        1, len(pivot.rows), figsize=(2.2 + 2.3 * len(pivot.rows), 0.9 + 0.32 * len(order)), sharey=True, squeeze=False
    )
    for axis, row in zip(axes[0], pivot.rows, strict=True):
        _panel(axis, pivot, row, order, colour)
    figure.suptitle(pivot.title, fontsize=11, x=0.01, ha="left", parse_math=False)
    lines = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="lower right", ncols=max(1, len(lines)), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def _panel(axis: Axes, pivot: Pivot, row: Key, order: list[Key], colour: Callable[[Key], str]) -> None:
    cells = [pivot.cells[row, column] for column in order]
    records = records_of_row(pivot, row)
    errors = [
        cell.std if cell.std is not None else _standard_error(pivot, records.get(column))
        for cell, column in zip(cells, order, strict=True)
    ]
    axis.barh(
        range(len(order)), [cell.mean or 0.0 for cell in cells], xerr=[error or 0.0 for error in errors],
        color=[colour(column) for column in order], height=0.7, error_kw={"lw": 0.8},
    )  # fmt: skip
    axis.set_yticks(range(len(order)), [pivot.column_name(column) for column in order], fontsize=9)
    if row in pivot.before:
        axis.axvline(pivot.before[row], color=BLACK, lw=1, ls="--", label="base model")
    chances = {record.score.chance for record in records.values() if record.score is not None}
    if pivot.measure is ACCURACY:
        axis.set_xlim(0, 100)
        if len(chances) == 1 and (chance := chances.pop()) is not None:
            axis.axvline(pivot.measure.scale * chance, color=BLACK, lw=1, ls=":", label="chance")
    axis.set_title(pivot.row_name(row), fontsize=10, parse_math=False)
    axis.set_xlabel(pivot.measure.title, fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _standard_error(pivot: Pivot, record: TunedRecord | None) -> float | None:
    if pivot.measure is not ACCURACY or record is None or record.score is None:
        return None
    return pivot.measure.scale * record.score.standard_error


def records_of_row(pivot: Pivot, row: Key) -> dict[Key, TunedRecord]:
    """The record of the first seed of each column."""
    found: dict[Key, TunedRecord] = {}
    for run in pivot.study.runs:
        here = tuple(run.axes[axis] for axis in pivot.row_axes) == row
        inside = all(run.axes[axis] == value for axis, value in pivot.group.items())
        if here and inside and isinstance(run.record, TunedRecord):
            found.setdefault(tuple(run.axes[axis] for axis in pivot.column_axes), run.record)
    return found
