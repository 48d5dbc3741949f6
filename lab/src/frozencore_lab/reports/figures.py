"""The figures of studies: each is a row of :data:`DRAWN`, with the width of a page.

A method has one colour in all figures, and legends have one order. Colour is never the only distinction: bars and
points have names, and lines have different markers and dashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from frozencore.tune.figures import BLACK, BLUE, GREY, NAVY, ORANGE, binned, method_colour, plain_ticks, plt
from frozencore.tune.methods import METHODS
from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.spec import Study
from frozencore_lab.reports.pivot import (
    ACCURACY,
    COSINES,
    FORGOTTEN,
    LOSS,
    Key,
    Measure,
    Pivot,
    column_averages,
    measures_of,
    pivots,
)
from frozencore_lab.reports.sheet import axis_name, value_name
from frozencore_lab.reports.statistics import paired_difference
from frozencore_lab.reports.tables import counted_values

CYCLE = (ORANGE, BLUE, "#009E73", "#D55E00", NAVY, "#CC79A7", BLACK, GREY, "#332288", "#999933", "#882255", "#44AA99")
MARKERS, DASHES, HATCHES = "osD^vPX*<>hp", ("-", "--", "-.", ":"), ("", "//", "..", "xx", "\\\\", "++")
WIDTH, MOST_IN_A_ROW, LEGEND_COLUMNS = 8.0, 2, 3
STYLE = {
    "font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 12, "figure.labelsize": 12,
    "grid.linewidth": 0.4, "grid.color": "#dddddd", "errorbar.capsize": 2, "lines.markersize": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when it is written: its file's name without an ending, description and remark below it."""

    name: str
    alt: str
    draw: Callable[[], Figure]
    remark: str = ""


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure.

    Attributes:
        draw: Draws a table with the measure of the figure.
        once: The title of a figure that does not depend on the measure, and so is drawn once; empty otherwise.
        against: What the measure is drawn against, as the caption names it.
        of_averages: The figure shows macro-averages, so it needs a complete column.
        only: The only measure that the figure shows; None for every measure.
    """

    draw: Callable[[Pivot], Figure]
    once: str = ""
    against: str = ""
    of_averages: bool = False
    only: Measure | None = None


def asked_figures(study: Study) -> tuple[str, ...]:
    """The kinds of figures of a study; a study without training always shows the convergence of its bases."""
    return study.report.figures if study.kind.trains else ("convergence",)


def study_drawings(results: StudyResults) -> Iterator[Drawing]:
    """The figures of a study, one for each of its tables with data."""
    asked = asked_figures(results.study)
    for i, measure in enumerate(measures_of(results)):
        for pivot in pivots(results, measure):
            for name in asked:
                kind, suffix = DRAWN[name], "" if name == asked[0] else f"-{name}"
                is_other = i > 0 if kind.once else kind.only not in (None, measure)
                means = [one.value for one in column_averages(pivot).values()]
                shown = means if kind.of_averages else [cell.mean for cell in pivot.cells.values()]
                if not is_other and any(value is not None for value in shown):
                    file = f"{pivot.name}{'' if kind.once else measure.suffix}{suffix}"
                    alt = f"{pivot.title}: {kind.once or measure.title}{kind.against}"
                    by_task = not kind.once and not kind.of_averages
                    drawn, remark = without_perfect_tasks(pivot) if by_task else (pivot, "")
                    yield Drawing(file, alt, partial(_styled, kind.draw, drawn), remark)


def without_perfect_tasks(pivot: Pivot) -> tuple[Pivot, str]:
    """Leave out the tasks on which every score is perfect, since they tell nothing apart, and name them in a remark.

    If every task is such a task, none is left out.
    """
    upright, best = pivot.upright, pivot.measure.perfect
    if best is None or "task" not in upright.row_axes:
        return pivot, ""
    kept = tuple(row for row in upright.rows if {*upright.row_means(row).values()} != {best})
    if len(kept) in (0, len(upright.rows)):
        return pivot, ""
    names = ", ".join(upright.row_name(row) for row in upright.rows if row not in kept)
    fewer = replace(pivot, rows=kept) if upright is pivot else replace(pivot, columns=kept)
    return fewer, f"Left out, because every score there is perfect ({best:g}): {names}."


def _styled(draw: Callable[[Pivot], Figure], pivot: Pivot) -> Figure:
    with plt.rc_context(STYLE):
        return draw(pivot)


# ------------------------------------------------------------------------------------------------------- common parts


def panels(count: int, height: float, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels in reading order, each of the given height in inches."""
    across = min(count, MOST_IN_A_ROW)
    down = math.ceil(count / across)
    size = WIDTH, 0.4 + down * height
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained", sharey=sharey)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def shared_legend(figure: Figure) -> Figure:
    """Put one legend above all panels."""
    found = {name: line for axis in figure.axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    if found:
        columns = min(len(found), LEGEND_COLUMNS)
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=columns)
    return figure


def methods_of(pivot: Pivot) -> dict[Key, str]:
    """The method of each column, in the order of the table of methods; the study's order among equals."""
    names = [dict(zip(pivot.column_axes, column, strict=True)).get("method") for column in pivot.columns]
    found = dict(zip(pivot.columns, map(pivot.study.study.method_of, map(str, names)), strict=True))
    order = {name: place for place, name in enumerate(METHODS)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[1], len(order))))


def column_colours(pivot: Pivot) -> dict[Key, str]:
    """The colour of each column's method; different colours if all are of one."""
    methods = methods_of(pivot)
    if len(set(methods.values())) == 1 < len(methods):
        return dict(zip(methods, cycle(CYCLE), strict=False))
    return {column: method_colour(name) for column, name in methods.items()}


def _one_panel(pivot: Pivot) -> tuple[Figure, Axes]:
    figure, (axis,) = panels(1, max(2.8, 0.9 + 0.35 * len(pivot.columns)))
    return figure, axis


def _ticks(axis: Axes, names: Sequence[str]) -> None:
    long = max(map(len, names)) * len(names) > 90
    axis.set_xticks(range(len(names)), names, rotation=30 if long else 0, ha="right" if long else "center")


def _title(measure: Measure) -> str:
    return measure.title.replace(", nats", ",\nnats")


# ---------------------------------------------------------------------------------------------------------- the kinds


def _ranking(pivot: Pivot) -> Figure:
    """Draw columns by their mean over the rows, best first, with the standard deviation of the seeds' means."""
    figure, axis = _one_panel(pivot)
    pivot = pivot.upright
    averages, colours = column_averages(pivot), column_colours(pivot)
    found = {column: average.value for column, average in averages.items() if average.value is not None}
    order = sorted(found, key=lambda column: found[column], reverse=pivot.measure.lower_is_better)
    for place, column in enumerate(order):
        axis.errorbar(found[column], place, xerr=averages[column].std, fmt="o", ms=7, color=colours[column], lw=1.2)
        shown = f"{found[column]:.{pivot.measure.decimals}f}"
        axis.annotate(shown, (found[column], place), xytext=(0, 6), textcoords="offset points", ha="center")
    axis.set_yticks(range(len(order)), [pivot.column_name(column) for column in order])
    axis.set_ylim(-0.6, len(order) - 0.2)
    axis.margins(x=0.12)
    axis.grid(axis="x")
    left_out = ", ".join(pivot.column_name(column) for column in pivot.columns if column not in found)
    axis.set_xlabel(f"mean {pivot.measure.title}" + (f"\n(incomplete: {left_out})" if left_out else ""))
    return figure


def _gains(pivot: Pivot) -> Figure:
    """Draw bars by row: each column minus the reference, or minus the first column without a reference."""
    figure, axis = _one_panel(pivot)
    pivot = pivot.upright
    base = pivot.reference or pivot.columns[0]
    others = [column for column in pivot.columns if column != base]
    width = 0.8 / max(1, len(others))
    for i, column in enumerate(others):
        means = [(pivot.cells[row, column].mean, pivot.cells[row, base].mean) for row in pivot.rows]
        gains = [math.nan if own is None or other is None else own - other for own, other in means]
        axis.bar(
            [place + (i - (len(others) - 1) / 2) * width for place in range(len(gains))], gains, width,
            label=pivot.column_name(column), color=CYCLE[i % len(CYCLE)], hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
    axis.axhline(0, color=BLACK, lw=0.8)
    _ticks(axis, [pivot.row_name(row) for row in pivot.rows])
    axis.set_ylabel(f"{pivot.measure.title},\nless that of {pivot.column_name(base)}")
    return shared_legend(figure)


def _lines(pivot: Pivot) -> Figure:
    """Draw a line for each task against the compared columns."""
    (figure, axis), upright = _one_panel(pivot), pivot.upright
    for i, row in enumerate(upright.rows):
        _line(axis, upright, row, upright.row_name(row), CYCLE[i % len(CYCLE)], MARKERS[i % 8], DASHES[i % 4])
    _against(axis, upright)
    axis.set_ylabel(_title(pivot.measure))
    return shared_legend(figure)


def _convergence(pivot: Pivot) -> Figure:
    """Draw mean principal-angle cosines of P (solid line) and Q (dashed) for each row against the columns."""
    figure, axis = _one_panel(pivot)
    (of_inputs,) = (one for one in pivots(pivot.study, COSINES[1]) if one.group == pivot.group)
    for row, colour in zip(pivot.rows, cycle(CYCLE), strict=False):
        name = f"{pivot.row_name(row)}: " if len(pivot.rows) > 1 else ""
        _line(axis, pivot, row, f"{name}P", colour, "o", "-")
        _line(axis, of_inputs, row, f"{name}Q", colour, "s", "--")
    _against(axis, pivot)
    axis.set_ylabel(f"cosine to the bases\nof {pivot.study.study.reference_size} examples")
    return shared_legend(figure)


def _line(axis: Axes, pivot: Pivot, row: Key, name: str, colour: str, marker: str, dash: str) -> None:
    cells = [pivot.cells[row, column] for column in pivot.columns]
    means = [math.nan if cell.mean is None else cell.mean for cell in cells]
    spreads = [cell.std or 0.0 for cell in cells]
    axis.errorbar(range(len(cells)), means, yerr=spreads, label=name, color=colour, marker=marker, ls=dash)


def _against(axis: Axes, pivot: Pivot) -> None:
    _ticks(axis, [", ".join(map(value_name, pivot.column_axes, column)) for column in pivot.columns])
    axis.set_xlabel(", ".join(map(axis_name, pivot.column_axes)))
    axis.grid(axis="y")


def _trained_values(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    plain_ticks(axis.xaxis)
    axis.margins(x=0.1, y=0.15)
    axis.set_xlabel("trained values")


def _state(pivot: Pivot) -> Figure:
    """Draw each column's mean over the rows against its number of trained values."""
    figure, axis = _one_panel(pivot)
    pivot = pivot.upright
    trained, means, colours = counted_values(pivot), column_averages(pivot), column_colours(pivot)
    for i, column in enumerate(colours):
        if (mean := means[column].value) is not None and column in trained:
            name, marker = pivot.column_name(column), MARKERS[i % len(MARKERS)]
            axis.plot(trained[column], mean, marker, color=colours[column], label=name, ms=8)
    _trained_values(axis)
    axis.set_ylabel(f"mean {_title(pivot.measure)}")
    return shared_legend(figure)


def _values(pivot: Pivot) -> Figure:
    """Draw loss against trained values, and beside it what was forgotten: cores and LoRA as one line each.

    A bar is the 95 % interval of the difference from the reference column; see
    :func:`frozencore_lab.reports.statistics.paired_difference`.
    """
    beside = [one for one in pivots(pivot.study, FORGOTTEN) if one.group == pivot.group]
    shown = [pivot, *(one for one in beside if any(cell.mean is not None for cell in one.cells.values()))]
    figure, axes = panels(len(shown), 3.6)
    trained, kinds = counted_values(pivot), {name: method.trains[0] for name, method in METHODS.items()}
    for axis, one in zip(axes, shown, strict=True):
        points: dict[str, list[tuple[int, float, float, str]]] = {"core": [], "factors": []}
        for column, method in methods_of(one).items():
            mean, half = _mean_and_half(one, column)
            if kinds.get(method) in points and column in trained and not math.isnan(mean):
                points[kinds[method]].append((trained[column], mean, half, one.column_name(column)))
        drawn = {kind: tuple(zip(*sorted(found), strict=True)) for kind, found in points.items() if found}
        highest = max(drawn, key=lambda kind: fmean(drawn[kind][1]), default=None)  # none: only other kinds have ended
        for kind, (counts, means, halves, names) in drawn.items():
            factored = [METHODS[one].label for one in dict.fromkeys(methods_of(pivot).values()) if kinds[one] == kind]
            name, colour, form = ("cores", ORANGE, "o-") if kind == "core" else (", ".join(factored), NAVY, "s--")
            axis.errorbar(counts, means, yerr=halves, fmt=form, color=colour, label=name)
            side = 1 if kind == highest else -1  # the labels of one line above it, of the other below
            for count, mean, half, label in zip(counts, means, halves, names, strict=True):
                axis.annotate(
                    label.partition(" ")[2] or label, (count, mean + side * half), xytext=(0, 6 * side),
                    textcoords="offset points", color=colour, ha="center", va="bottom" if side > 0 else "top",
                )  # fmt: skip
        _trained_values(axis)
        axis.set_ylabel(_title(one.measure))
        axis.grid(axis="y")
    if pivot.reference is not None:
        reference = pivot.column_name(pivot.reference)
        figure.supxlabel(f"Bars: 95 % interval of the difference from {reference}.")
    return shared_legend(figure)


def _mean_and_half(pivot: Pivot, column: Key) -> tuple[float, float]:
    """The mean over the rows, and half the interval of its difference from the reference; NaN for a missing mean."""
    mean, base = column_averages(pivot)[column].value, pivot.reference
    if mean is None or base in (None, column) or len(pivot.rows) > 1:
        return math.nan if mean is None else mean, 0.0
    assert base is not None
    own, other = (pivot.cells[pivot.rows[0], one].scored(pivot.measure) or {} for one in (column, base))
    if not own or own.keys() != other.keys():
        return mean, 0.0
    return mean, paired_difference([*own.values()], [other[seed] for seed in own]).half or 0.0


def _row_panels(pivot: Pivot) -> Figure:
    """Draw bars by mean, best on top, with the base model and chance.

    Error bars are the standard deviation over seeds, or for a single seed the standard error over evaluated rows."""
    means, colours = {column: one.value for column, one in column_averages(pivot).items()}, column_colours(pivot)
    order = sorted(means, key=lambda column: means[column] or 0.0, reverse=pivot.measure.lower_is_better)
    figure, axes = panels(len(pivot.rows), 0.9 + 0.36 * len(order), sharey=True)
    for axis, row in zip(axes, pivot.rows, strict=True):
        cells = [pivot.cells[row, column] for column in order]
        scores = [cell.record.score if cell.record and pivot.measure is ACCURACY else None for cell in cells]
        errors = [
            cell.std or (pivot.measure.scale * score.standard_error if score and cell.std is None else 0.0)
            for cell, score in zip(cells, scores, strict=True)
        ]
        axis.barh(
            range(len(order)), [cell.mean or 0.0 for cell in cells], xerr=errors, height=0.7, error_kw={"lw": 0.8},
            color=[colours[column] for column in order],
        )  # fmt: skip
        axis.set_yticks(range(len(order)), [pivot.column_name(column) for column in order])
        if row in pivot.before:
            axis.axvline(pivot.before[row], color=GREY, lw=1.5, ls="--", label="base model")
        if pivot.measure is ACCURACY:
            axis.set_xlim(0, 100)
        chances = {score.chance for score in scores if score is not None}
        if len(chances) == 1 and (chance := chances.pop()) is not None:
            axis.axvline(pivot.measure.scale * chance, color=BLACK, lw=1, ls=":", label="chance")
        axis.set_title(pivot.row_name(row))
    figure.supxlabel(pivot.measure.title)
    return shared_legend(figure)


def _learning_curves(pivot: Pivot) -> Figure:
    """Draw the first seed's training loss of every column against steps, smoothed over a twentieth of the steps."""
    figure, axes = panels(len(pivot.rows), 3.0)
    for axis, row in zip(axes, pivot.rows, strict=True):
        for i, (column, colour) in enumerate(column_colours(pivot).items()):
            record = pivot.cells[row, column].record
            losses = [loss for loss in record.training.losses if loss is not None] if record else []
            axis.plot(*binned(losses), color=colour, ls=DASHES[i % 4], lw=1.2, label=pivot.column_name(column))
        axis.set_title(pivot.row_name(row))
    figure.supxlabel("optimiser step")
    figure.supylabel("training loss, nats per token")
    return shared_legend(figure)


DRAWN: dict[str, FigureKind] = {
    "ranking": FigureKind(_ranking, of_averages=True),
    "gains": FigureKind(_gains),
    "lines": FigureKind(_lines),
    "state": FigureKind(_state, against=", by the values that train", of_averages=True),
    "values": FigureKind(
        _values, against=" and what was forgotten, by the values that train", of_averages=True, only=LOSS
    ),
    "panels": FigureKind(_row_panels),
    "curves": FigureKind(_learning_curves, once="learning curves"),
    "convergence": FigureKind(_convergence, once="basis convergence"),
}
