"""The style of figures, in colours that colour-blind readers can tell apart (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from frozencore.constructors import Colour
from frozencore.tune.methods import METHODS

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

plt.rcParams["text.parse_math"] = False  # names may contain dollar signs

__all__ = [
    "BLACK", "BLUE", "GREY", "NAVY", "ORANGE", "POINTS", "binned", "method_colour", "plain_ticks", "plt", "save_figure",
]  # fmt: skip

POINTS = 20  # of a curve, each the mean of several steps: single batches differ more than methods
ORANGE, BLUE, NAVY, GREY, BLACK = "#E69F00", "#56B4E9", "#0072B2", "#999999", "#222222"
COLOURS: dict[Colour, str] = {"orange": ORANGE, "blue": BLUE, "navy": NAVY, "grey": GREY, "black": BLACK}


def method_colour(name: str) -> str:
    """A method's colour; grey for a method that is not in the table."""
    return COLOURS[METHODS[name].colour] if name in METHODS else GREY


def plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis 1k, 10k, 1M: matplotlib's powers need mathematical text, which is off."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((1e6, "M"), (1e3, "k")) if value >= size), (1, ""))
    return f"{value / size:g}{unit}"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, with the same bytes each time, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def binned(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Split the steps into at most ``POINTS`` groups; return the groups' middles and means."""
    if not losses:
        return [], []
    parts = np.array_split(np.arange(len(losses)), min(POINTS, len(losses)))
    return [float(part.mean()) + 1 for part in parts], [float(np.mean([losses[i] for i in part])) for part in parts]
