"""Learning curves: a panel for each row of a table, the training loss of every column against the steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

from matplotlib.figure import Figure

from frozencore.cli.figure_style import binned, plt
from frozencore_lab.reports.figures.rows import records_of_row
from frozencore_lab.reports.tables.pivot import Key, Pivot

DASHES = ("-", "--", "-.", ":")


def learning_curves(pivot: Pivot, colour: Callable[[Key], str]) -> Figure:
    """Means over a twentieth of the steps each, of the first seed."""
    figure, axes = plt.subplots(1, len(pivot.rows), figsize=(2.2 + 2.6 * len(pivot.rows), 3.0), squeeze=False)
    for axis, row in zip(axes[0], pivot.rows, strict=True):
        records = records_of_row(pivot, row)
        dashes: dict[str, cycle[str]] = {}
        for column in pivot.columns:
            losses = [loss for loss in records[column].training.losses if loss is not None] if column in records else []
            dash = next(dashes.setdefault(colour(column), cycle(DASHES)))
            axis.plot(*binned(losses), color=colour(column), ls=dash, lw=1.2, label=pivot.column_name(column))
        axis.set_title(pivot.row_name(row), fontsize=10, parse_math=False)
        axis.set_xlabel("optimiser step", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("training loss, nats per token", fontsize=9)
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"{pivot.title}: learning curves", fontsize=11, x=0.01, ha="left", parse_math=False)
    figure.tight_layout()
    return figure
