"""The common style of figures: one width, one style, panels in reading order, distinct colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from frozencore.tune.figures import BLACK, BLUE, GREY, NAVY, ORANGE, method_colour, plt

CYCLE = (ORANGE, BLUE, "#009E73", "#D55E00", NAVY, "#CC79A7", BLACK, GREY, "#332288", "#999933", "#882255", "#44AA99")
MARKERS, DASHES = "osD^vPX*<>hp", ("-", "--", "-.", ":")
WIDTH, MOST_IN_A_ROW = 10.0, 3
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 10, "figure.labelsize": 10,
    "grid.linewidth": 0.4, "grid.color": "#dddddd", "errorbar.capsize": 2, "lines.markersize": 6,
}  # fmt: skip


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of reports."""

    def drawn(*arguments: object, **options: object) -> Figure:
        with plt.rc_context(STYLE):
            return draw(*arguments, **options)

    return drawn


def panels(count: int, height: float, *, most: int = MOST_IN_A_ROW, **options: bool) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels in reading order, each of the given height in inches."""
    across = 2 if count == 4 else min(count, most)
    down = math.ceil(count / across)
    size = WIDTH, 0.4 + down * height
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained", **options)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def shared_legend(figure: FigureBase, axes: Iterable[Axes], *, columns: int = 4) -> None:
    """Put one legend above all panels."""
    found = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=min(len(found), columns))


def distinct_colours(methods: Sequence[str]) -> list[str]:
    """A colour for each method: its own if it has one, otherwise an unused one."""
    own = [method_colour(method) for method in methods]
    kept = [colour if colour in (ORANGE, BLUE, NAVY) and colour not in own[:i] else "" for i, colour in enumerate(own)]
    free = cycle(colour for colour in CYCLE if colour not in kept)
    return [colour or next(free) for colour in kept]
