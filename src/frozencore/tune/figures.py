"""Figures: their style, and a training's curve.

One colour a method, everywhere: cores in orange and brown (FCCA is the orange), LoRA and its kin in blue (LoRA is the
navy), full fine-tuning black, the base model grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np

from frozencore.tune.methods import METHODS
from frozencore.tune.record import TunedRecord

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

plt.rcParams["text.parse_math"] = False  # names may contain dollar signs

__all__ = [
    "BLACK", "BLUE", "CORES", "FACTORS", "GREY", "NAVY", "ORANGE", "POINTS", "binned", "method_colour",
    "plain_ticks", "plt", "save_figure", "write_curve",
]  # fmt: skip

POINTS = 20  # of a curve, each the mean of several steps: single batches differ more than methods
ORANGE, BLUE, NAVY, GREY, BLACK = "#E69F00", "#56B4E9", "#0072B2", "#999999", "#222222"
CORES = (ORANGE, "#B35900", "#F2C14E", "#7A3E00", "#D9825B", "#A68A00", "#C9A66B", "#8C6239", "#E8B4A0")
FACTORS, OTHERS = (NAVY, BLUE, "#44AA99"), (BLACK, "#882255", "#117733", "#AA4499")


def method_colour(name: str) -> str:
    """A method's colour: by what it trains, and by its place among such methods; grey if it is not in the table."""
    if name not in METHODS:
        return GREY
    palettes = {"core": CORES, "factors": FACTORS}
    kind = METHODS[name].trains[0]
    alike = [other for other, method in METHODS.items() if palettes.get(method.trains[0]) is palettes.get(kind)]
    palette = palettes.get(kind, OTHERS)
    return palette[alike.index(name) % len(palette)]


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


def write_curve(record: TunedRecord, file: Path) -> None:
    """Draw the loss of each step of a training, smoothed too, the held-out loss before and after, and scores."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    steps = [(step, loss) for step, loss in enumerate(record.training.losses, start=1) if loss is not None]
    thin = {"alpha": 0.3, "lw": 0.8} if len(steps) > POINTS else {"lw": 1.6}
    axes.plot(*zip(*steps, strict=True) if steps else ((), ()), color=NAVY, label="each step", **thin)
    if len(steps) > POINTS:
        axes.plot(*binned([loss for _, loss in steps]), color=NAVY, lw=1.6, label="smoothed")
    kept_step = record.selection.kept_step if record.selection else record.training.num_steps
    held_out = {0: record.held_out_loss_before, kept_step: record.held_out_loss}
    known = {step: loss for step, loss in held_out.items() if loss is not None}
    axes.plot(list(known), list(known.values()), "D", color=BLACK, ms=5, label="held-out rows, before and after")
    for step, loss in known.items():
        axes.annotate(f"{loss:.3f}", (step, loss), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    if record.selection and record.selection.scores:
        scored = [(score.step, score.held_out_loss) for score in record.selection.scores]
        axes.plot(*zip(*scored, strict=True), "o-", color=ORANGE, ms=4, lw=1.2, label="validation rows")
        axes.axvline(kept_step, color=GREY, ls=":", lw=1, label="kept")
    axes.margins(y=0.12)  # the number above the highest point stays below the title
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss, nats per token")
    title = f"{Path(record.config.model).name}, {record.method} on {record.task or record.config.sources}"
    axes.set_title(title, fontsize=10, loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save_figure(figure, file)
