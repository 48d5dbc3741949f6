"""The figures that a study asks for, in the colours of the paper's: FCCA orange, RawGrad blue, EVA navy, others grey.

Nothing is told by colour alone: bars and points carry names, lines have markers and dashes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from frozencore.cli.figure_style import BLACK, BLUE, GREY, NAVY, ORANGE, method_colour, plain_ticks, plt
from frozencore_lab.campaign.results import StudyResults
from frozencore_lab.campaign.spec import Figure as FigureKind
from frozencore_lab.campaign.spec import column_key
from frozencore_lab.reports.document import Drawing
from frozencore_lab.reports.figures.curves import learning_curves
from frozencore_lab.reports.figures.rows import row_panels
from frozencore_lab.reports.labels import axis_name, value_name
from frozencore_lab.reports.tables.averages import column_averages, over_rows
from frozencore_lab.reports.tables.measures import COSINES, measures_of
from frozencore_lab.reports.tables.pivot import Key, Pivot, PivotCell, pivots
from frozencore_lab.reports.tables.tradeoff import counted_values

GREEN, VERMILION, PURPLE = "#009E73", "#D55E00", "#CC79A7"
CYCLE = (ORANGE, BLUE, GREEN, VERMILION, NAVY, PURPLE, BLACK, GREY)
MARKERS, DASHES = "osD^vPX*", ("-", "--", "-.", ":")
Draw = Callable[[Pivot], Figure]
DrawOn = Callable[[Axes, Pivot], None]
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def study_drawings(results: StudyResults) -> Iterator[Drawing]:
    """The figures that the study asks for, one for each of its tables that has something to show yet.

    None where it asks for none. A stability study always has one.
    """
    for pivot, kind, draw, name, what in _figures_of(results):
        if kind in ("ranking", "state"):
            values = [average.value for average in column_averages(pivot).values()]
        else:
            values = [cell.mean for cell in pivot.cells.values()]
        if any(value is not None for value in values):
            yield Drawing(name, f"{pivot.title}: {what}", partial(draw, pivot))


def _figures_of(results: StudyResults) -> Iterator[tuple[Pivot, str, Draw, str, str]]:
    if not results.study.kind.trains:
        for P, Q in zip(*(pivots(results, measure) for measure in COSINES), strict=True):
            yield P, "convergence", partial(_figure, draw=partial(_convergence, input_=Q)), P.name, "basis convergence"
        return
    wanted = results.study.report.figures
    for i, measure in enumerate(measures_of(results)):
        for pivot in pivots(results, measure):
            for kind in wanted:
                suffix = "" if kind == wanted[0] else f"-{kind}"
                if kind != "curves":
                    yield pivot, kind, DRAWN[kind], pivot.name + measure.suffix + suffix, measure.title
                elif i == 0:  # they are of the training rows: the same whatever is measured afterwards
                    yield pivot, kind, DRAWN[kind], pivot.name + suffix, "learning curves"


def _figure(pivot: Pivot, draw: DrawOn) -> Figure:
    figure, axis = plt.subplots(figsize=(4.6, max(2.6, 0.9 + 0.27 * len(pivot.columns))))
    draw(axis, pivot)
    axis.set_title(pivot.title, fontsize=9, loc="left", wrap=True, parse_math=False)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


def draw_ranking(axis: Axes, pivot: Pivot) -> None:
    """Columns by their mean over the rows, best first, with the standard deviation of the seeds' own means."""
    averages = column_averages(pivot)
    found = {column: average.value for column, average in averages.items() if average.value is not None}
    order = sorted(found, key=lambda column: found[column], reverse=pivot.measure.lower_is_better)
    for place, column in enumerate(order):
        value, colour = found[column], _colour(pivot, column)
        axis.errorbar(value, place, xerr=averages[column].std, fmt="o", ms=7, color=colour, capsize=2, lw=1.2)
        axis.annotate(
            f"{value:.{pivot.measure.decimals}f}", (value, place), xytext=(0, 6), textcoords="offset points",
            fontsize=7, ha="center",
        )  # fmt: skip
    axis.set_yticks(range(len(order)), [pivot.column_name(column) for column in order])
    axis.set_ylim(-0.6, len(order) - 0.2)
    axis.grid(axis="x", lw=0.4, color="#dddddd")
    left_out = ", ".join(pivot.column_name(column) for column in pivot.columns if column not in found)
    axis.set_xlabel(f"mean {pivot.measure.title}" + (f"\n(incomplete: {left_out})" if left_out else ""), fontsize=8)


def _gains(axis: Axes, pivot: Pivot) -> None:
    """Bars by row: each column less the reference, or less the first column where none is named."""
    wanted = pivot.study.study.report.reference
    base = next((column for column in pivot.columns if column_key(column) == wanted), pivot.columns[0])
    others = [column for column in pivot.columns if column != base]
    width = 0.8 / max(1, len(others))
    for i, column in enumerate(others):
        heights = [_gain(pivot.cells[row, column], pivot.cells[row, base]) for row in pivot.rows]
        axis.bar(
            [place + (i - (len(others) - 1) / 2) * width for place in range(len(heights))], heights, width,
            label=pivot.column_name(column), color=CYCLE[i % len(CYCLE)], hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
    axis.axhline(0, color=BLACK, lw=0.8)
    _ticks(axis, [pivot.row_name(row) for row in pivot.rows])
    axis.set_ylabel(f"{pivot.measure.title}, less that of {pivot.column_name(base)}", fontsize=7)
    _legend(axis)


def _gain(cell: PivotCell, base: PivotCell) -> float:
    return math.nan if cell.mean is None or base.mean is None else cell.mean - base.mean


def _lines(axis: Axes, pivot: Pivot) -> None:
    """A line for each row against the columns; for each column against the rows, where the tasks are columns."""
    if over_rows(pivot):
        series = {pivot.row_name(row): [pivot.cells[row, column] for column in pivot.columns] for row in pivot.rows}
    else:
        series = {pivot.column_name(key): [pivot.cells[row, key] for row in pivot.rows] for key in pivot.columns}
    styles = cycle(zip(CYCLE, MARKERS, DASHES * 2, strict=True))
    for (name, cells), (colour, marker, dash) in zip(series.items(), styles, strict=False):
        _line(axis, cells, name, colour, marker, dash)
    _against(axis, pivot)
    axis.set_ylabel(pivot.measure.title, fontsize=8)
    _legend(axis)


def _convergence(axis: Axes, output: Pivot, *, input_: Pivot) -> None:
    """Mean principal-angle cosines of P (whole line) and Q (dashed) for each row against the columns."""
    colours = cycle((NAVY, ORANGE, GREEN, VERMILION, PURPLE, BLACK))
    for row, colour in zip(output.rows, colours, strict=False):
        name = f"{output.row_name(row)}: " if len(output.rows) > 1 else ""
        for pivot, side, marker, dash in ((output, "P", "o", "-"), (input_, "Q", "s", "--")):
            _line(axis, [pivot.cells[row, column] for column in pivot.columns], name + side, colour, marker, dash)
    _against(axis, output)
    axis.set_ylabel(f"cosine to the bases of {output.study.study.reference_size} examples", fontsize=7)
    _legend(axis)


def _line(axis: Axes, cells: Sequence[PivotCell], name: str, colour: str, marker: str, dash: str) -> None:
    means = [math.nan if cell.mean is None else cell.mean for cell in cells]
    axis.errorbar(
        range(len(cells)), means, yerr=[cell.std or 0.0 for cell in cells], label=name, color=colour, marker=marker,
        ls=dash, ms=5, lw=1.5, capsize=2,
    )  # fmt: skip


def _against(axis: Axes, pivot: Pivot) -> None:
    axes, keys = (pivot.column_axes, pivot.columns) if over_rows(pivot) else (pivot.row_axes, pivot.rows)
    names = [", ".join(value_name(name, value) for name, value in zip(axes, key, strict=True)) for key in keys]
    _ticks(axis, names)
    axis.set_xlabel(", ".join(map(axis_name, axes)), fontsize=8)
    axis.grid(axis="y", lw=0.4, color="#dddddd")


def _ticks(axis: Axes, names: Sequence[str]) -> None:
    long = max(map(len, names)) * len(names) > 45
    axis.set_xticks(range(len(names)), names, rotation=30 if long else 0, ha="right" if long else "center")


def _legend(axis: Axes) -> None:
    """At the right of the panel, where it covers nothing."""
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _state(axis: Axes, pivot: Pivot) -> None:
    """Each column's mean over the rows against the values that it trains in all."""
    trained = {column: in_all for column, (_, in_all) in counted_values(pivot).items()}
    points = sorted(
        (average.value, column)
        for column, average in column_averages(pivot).items()
        if average.value is not None and column in trained
    )
    for value, column in points:
        axis.plot(trained[column], value, "o", ms=7, color=_colour(pivot, column))
    low, high = (points[0][0], points[-1][0]) if points else (0.0, 1.0)
    edge = 0.15 * max(high - low, 1e-6)
    axis.set_ylim(low - edge, high + edge)
    for size in sorted({_magnitude(trained[column]) for _, column in points}):
        near = [(value, column) for value, column in points if _magnitude(trained[column]) == size]
        for (value, column), place in zip(near, _apart([value for value, _ in near], edge / 2.8), strict=True):
            axis.annotate(
                pivot.column_name(column), (trained[column], value), xytext=(trained[column] * 1.3, place), fontsize=7,
                va="center", arrowprops={"arrowstyle": "-", "lw": 0.4, "color": GREY},
            )  # fmt: skip
    axis.set_xscale("log")
    plain_ticks(axis.xaxis)
    axis.margins(x=0.3)
    axis.set_xlabel("values trained in all", fontsize=8)
    axis.set_ylabel(f"mean {pivot.measure.title}", fontsize=8)


def _magnitude(count: int) -> int:
    return round(2 * math.log10(max(1, count)))


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Places for rising values, at least ``gap`` apart: what would overlap is spread around its middle."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and _top_of(blocks[-2], gap) + gap > _top_of(blocks[-1], -gap):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [_top_of(block, -gap) + i * gap for block in blocks for i in range(len(block))]


def _top_of(block: Sequence[float], gap: float) -> float:
    """The last place of a block of values spread around their middle; the first one for a negative gap."""
    return sum(block) / len(block) + (len(block) - 1) / 2 * gap


def _colour(pivot: Pivot, column: Key) -> str:
    method = next((value for axis, value in zip(pivot.column_axes, column, strict=True) if axis == "method"), None)
    return method_colour(pivot.study.study.method_of(str(method)))


def _coloured(draw: Callable[[Pivot, Callable[[Key], str]], Figure]) -> Draw:
    return lambda pivot: draw(pivot, partial(_colour, pivot))


DRAWN: dict[FigureKind, Draw] = {
    "ranking": partial(_figure, draw=draw_ranking),
    "gains": partial(_figure, draw=_gains),
    "lines": partial(_figure, draw=_lines),
    "state": partial(_figure, draw=_state),
    "panels": _coloured(row_panels),
    "curves": _coloured(learning_curves),
}
