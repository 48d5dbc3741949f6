"""The figures of studies: each is a row of :data:`DRAWN`, with the width of a page.

FCCA is orange, RawGrad blue and EVA navy as in the paper; every other method has its own colour. Colour is never the
only distinction: bars and points have names, and lines have different markers and dashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from frozencore.tune.figures import BLACK, binned, plain_ticks
from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.spec import Study
from frozencore_lab.reports.canvas import CYCLE, DASHES, MARKERS, distinct_colours, panels, shared_legend, styled
from frozencore_lab.reports.document import Drawing
from frozencore_lab.reports.labels import axis_name, value_name
from frozencore_lab.reports.tables.averages import column_averages
from frozencore_lab.reports.tables.further import counted_values
from frozencore_lab.reports.tables.pivot import ACCURACY, COSINES, Key, Pivot, PivotCell, measures_of, pivots

HATCHES = ("", "//", "..", "xx", "\\\\", "++")


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure.

    Attributes:
        once: The title of a figure that does not depend on the measure, and so is drawn once; empty otherwise.
        against: What the measure is drawn against, as the caption names it.
        of_averages: The figure shows macro-averages, so it needs a complete column.
    """

    draw: Callable[[Pivot], Figure]
    once: str = ""
    against: str = ""
    of_averages: bool = False

    def has_something(self, pivot: Pivot) -> bool:
        """Return whether the table has data for the figure."""
        averages = [one.value for one in column_averages(pivot).values()]
        values = averages if self.of_averages else [cell.mean for cell in pivot.cells.values()]
        return any(value is not None for value in values)


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
                if (kind.once and i) or not kind.has_something(pivot):
                    continue
                file = f"{pivot.name}{'' if kind.once else measure.suffix}{suffix}"
                alt = f"{pivot.title}: {kind.once or measure.title}{kind.against}"
                yield Drawing(file, alt, partial(kind.draw, pivot))


def column_colours(pivot: Pivot) -> dict[Key, str]:
    methods = [dict(zip(pivot.column_axes, column, strict=True)).get("method") for column in pivot.columns]
    names = [pivot.study.study.method_of(str(method)) for method in methods]
    return dict(zip(pivot.columns, distinct_colours(names), strict=True))


@styled
def _alone(pivot: Pivot, *, draw: Callable[[Axes, Pivot], None]) -> Figure:
    figure, (axis,) = panels(1, max(2.8, 0.9 + 0.3 * len(pivot.columns)))
    draw(axis, pivot)
    return figure


def _ranking(axis: Axes, pivot: Pivot) -> None:
    """Draw columns by their mean over the rows, best first, with the standard deviation of the seeds' means."""
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


def _gains(axis: Axes, pivot: Pivot) -> None:
    """Draw bars by row: each column minus the reference, or minus the first column without a reference."""
    base = pivot.reference or pivot.columns[0]
    others = [column for column in pivot.columns if column != base]
    width = 0.8 / max(1, len(others))
    for i, column in enumerate(others):
        gains = [_difference(pivot.cells[row, column], pivot.cells[row, base]) for row in pivot.rows]
        axis.bar(
            [place + (i - (len(others) - 1) / 2) * width for place in range(len(gains))], gains, width,
            label=pivot.column_name(column), color=CYCLE[i % len(CYCLE)], hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
    axis.axhline(0, color=BLACK, lw=0.8)
    _ticks(axis, [pivot.row_name(row) for row in pivot.rows])
    axis.set_ylabel(f"{pivot.measure.title},\nless that of {pivot.column_name(base)}")
    shared_legend(axis.figure, [axis])


def _difference(cell: PivotCell, base: PivotCell) -> float:
    return math.nan if cell.mean is None or base.mean is None else cell.mean - base.mean


def _lines(axis: Axes, pivot: Pivot) -> None:
    """Draw a line for each task against the compared columns."""
    upright = pivot.upright
    for i, row in enumerate(upright.rows):
        _line(axis, upright, row, upright.row_name(row), CYCLE[i % len(CYCLE)], MARKERS[i % 8], DASHES[i % 4])
    _against(axis, upright)
    axis.set_ylabel(pivot.measure.title.replace(", nats", ",\nnats"))
    shared_legend(axis.figure, [axis])


def _convergence(axis: Axes, pivot: Pivot) -> None:
    """Draw mean principal-angle cosines of P (solid line) and Q (dashed) for each row against the columns."""
    (of_inputs,) = (one for one in pivots(pivot.study, COSINES[1]) if one.group == pivot.group)
    for row, colour in zip(pivot.rows, cycle(CYCLE), strict=False):
        name = f"{pivot.row_name(row)}: " if len(pivot.rows) > 1 else ""
        _line(axis, pivot, row, f"{name}P", colour, "o", "-")
        _line(axis, of_inputs, row, f"{name}Q", colour, "s", "--")
    _against(axis, pivot)
    axis.set_ylabel(f"cosine to the bases\nof {pivot.study.study.reference_size} examples")
    shared_legend(axis.figure, [axis])


def _line(axis: Axes, pivot: Pivot, row: Key, name: str, colour: str, marker: str, dash: str) -> None:
    cells = [pivot.cells[row, column] for column in pivot.columns]
    means = [math.nan if cell.mean is None else cell.mean for cell in cells]
    spreads = [cell.std or 0.0 for cell in cells]
    axis.errorbar(range(len(cells)), means, yerr=spreads, label=name, color=colour, marker=marker, ls=dash)


def _against(axis: Axes, pivot: Pivot) -> None:
    names = [", ".join(map(value_name, pivot.column_axes, column)) for column in pivot.columns]
    _ticks(axis, names)
    axis.set_xlabel(", ".join(map(axis_name, pivot.column_axes)))
    axis.grid(axis="y")


def _ticks(axis: Axes, names: Sequence[str]) -> None:
    long = max(map(len, names)) * len(names) > 90
    axis.set_xticks(range(len(names)), names, rotation=30 if long else 0, ha="right" if long else "center")


def _state(axis: Axes, pivot: Pivot) -> None:
    """Draw each column's mean over the rows against its number of trained values."""
    trained, colours = counted_values(pivot), column_colours(pivot)
    for i, (column, mean) in enumerate(column_averages(pivot).items()):
        if mean.value is not None and column in trained:
            name, marker = pivot.column_name(column), MARKERS[i % len(MARKERS)]
            axis.plot(trained[column], mean.value, marker, color=colours[column], label=name, ms=8)
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.margins(x=0.1, y=0.15)
    axis.set_xlabel("trained values")
    axis.set_ylabel(f"mean {pivot.measure.title}".replace(", nats", ",\nnats"))
    shared_legend(axis.figure, [axis])


@styled
def _row_panels(pivot: Pivot) -> Figure:
    """Draw bars by mean, best on top, with the base model and chance.

    Error bars are the standard deviation over seeds, or for a single seed the standard error over evaluated rows."""
    means, colours = {column: one.value for column, one in column_averages(pivot).items()}, column_colours(pivot)
    order = sorted(means, key=lambda column: means[column] or 0.0, reverse=pivot.measure.lower_is_better)
    figure, axes = panels(len(pivot.rows), 0.9 + 0.32 * len(order), sharey=True)
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
            axis.axvline(pivot.before[row], color=BLACK, lw=1, ls="--", label="base model")
        if pivot.measure is ACCURACY:
            axis.set_xlim(0, 100)
        chances = {score.chance for score in scores if score is not None}
        if len(chances) == 1 and (chance := chances.pop()) is not None:
            axis.axvline(pivot.measure.scale * chance, color=BLACK, lw=1, ls=":", label="chance")
        axis.set_title(pivot.row_name(row))
    figure.supxlabel(pivot.measure.title)
    shared_legend(figure, axes)
    return figure


@styled
def _learning_curves(pivot: Pivot) -> Figure:
    """Draw the first seed's training loss of every column against steps, smoothed over a twentieth of the steps."""
    figure, axes = panels(len(pivot.rows), 3.0)
    colours = column_colours(pivot)
    for axis, row in zip(axes, pivot.rows, strict=True):
        for i, column in enumerate(pivot.columns):
            record = pivot.cells[row, column].record
            losses = [loss for loss in record.training.losses if loss is not None] if record else []
            axis.plot(*binned(losses), color=colours[column], ls=DASHES[i % 4], lw=1.2, label=pivot.column_name(column))
        axis.set_title(pivot.row_name(row))
    figure.supxlabel("optimiser step")
    figure.supylabel("training loss, nats per token")
    shared_legend(figure, axes)
    return figure


DRAWN: dict[str, FigureKind] = {
    "ranking": FigureKind(partial(_alone, draw=_ranking), of_averages=True),
    "gains": FigureKind(partial(_alone, draw=_gains)),
    "lines": FigureKind(partial(_alone, draw=_lines)),
    "state": FigureKind(partial(_alone, draw=_state), against=", by the values that train", of_averages=True),
    "panels": FigureKind(_row_panels),
    "curves": FigureKind(_learning_curves, once="learning curves"),
    "convergence": FigureKind(partial(_alone, draw=_convergence), once="basis convergence"),
}
