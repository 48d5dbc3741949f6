"""Rankings of several tables beside one another, like the paper's cross-model figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from frozencore.cli.figure_style import plt
from frozencore_lab.reports.figures.study import draw_ranking
from frozencore_lab.reports.tables.means_across import NamedPivot

MOST_IN_A_ROW = 4


def ranking_panels(lines: Sequence[NamedPivot], title: str) -> Figure:
    """A panel a table: its columns by their macro-average, best first; each panel has an order and a scale of its own.

    A panel lies in reading order; at most four stand in a row.
    """
    across = min(len(lines), MOST_IN_A_ROW)
    down = math.ceil(len(lines) / across)
    tallest = max(len(line.pivot.columns) for line in lines)
    figure, axes = plt.subplots(
        down, across, figsize=(3.1 * across, 0.5 + down * max(2.4, 0.9 + 0.27 * tallest)), squeeze=False
    )
    for place, line in zip(axes.flat, lines, strict=False):
        draw_ranking(place, line.pivot)
        place.margins(x=0.12)
        place.set_title(", ".join(line.labels), fontsize=9, loc="left", parse_math=False)
        place.tick_params(labelsize=8)
        place.spines[["top", "right"]].set_visible(False)
    for place in axes.flat[len(lines) :]:
        place.set_visible(False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    figure.tight_layout()
    return figure
