"""Where whitening pays on a real model: table and figure of docs/smollm2.md, from the records of whitening.py.

Losses of two constructors are compared seed by seed. The *gain* is the loss of another constructor minus FCCA's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from harness import RESULTS, lines_of, table
from quality_tables import NAMES, half_interval, spread
from tenants_quality_tables import rank_interval

LINES = RESULTS / "whitening.jsonl"
OTHERS = ("rawgrad", "filora")
SIDES = ("input_spread", "error_spread")


class Study:
    """The spreads of each decoder layer, and the losses by unit and constructor in the order of the seeds."""

    def __init__(self, lines: Path = LINES) -> None:
        self.spreads: dict[str, tuple[float, float]] = {}
        self.losses: dict[str, dict[str, list[float]]] = defaultdict(dict)
        self.layers: dict[str, list[int]] = {}
        records = sorted(lines_of(lines), key=lambda record: record.get("seed", 0))
        for record in records:
            unit = record.get("unit")
            if record["phase"] == "spread":
                self.spreads[unit] = tuple(record[side] for side in SIDES)
            elif record["phase"] == "final":
                self.losses[unit].setdefault(record["constructor"], []).append(record["loss"])
                self.layers[unit] = record["layers"]
        (self.base,) = (record["loss"] for record in records if record["phase"] == "base")

    @property
    def units(self) -> list[str]:
        """The single layers by their spread, the largest first; then the groups."""
        groups = [unit for unit, layers in self.layers.items() if len(layers) > 1]
        return [*sorted(self.single, key=self.spread, reverse=True), *sorted(groups)]

    @property
    def single(self) -> list[str]:
        """The units of one layer."""
        return [unit for unit, layers in self.layers.items() if len(layers) == 1]

    def of_side(self, unit: str, side: int) -> float:
        """The spread of the inputs (0) or the errors (1), the geometric mean over the layers of a unit."""
        return math.exp(np.mean([math.log(self.spreads[str(layer)][side]) for layer in self.layers[unit]]))

    def spread(self, unit: str) -> float:
        """The spread of both sides, their product."""
        return self.of_side(unit, 0) * self.of_side(unit, 1)

    def gains(self, unit: str, other: str) -> list[float]:
        """By how much FCCA's loss is lower than another's, seed by seed."""
        found = self.losses[unit]
        return [theirs - mine for theirs, mine in zip(found[other], found["fcca"], strict=True)]


def losses(study: Study) -> str:
    """Spreads and losses of each unit, and the gains with their 95 % intervals."""
    rows = []
    for unit in study.units:
        name = f"layer {unit}" if unit in study.single else f"{len(study.layers[unit])} layers, {unit} spread"
        rows.append(
            [name, *(f"{study.of_side(unit, side):,.0f}" for side in (0, 1)),
             *(spread(study.losses[unit][one], 3) for one in ("fcca", *OTHERS)),
             *(in_words(study.gains(unit, other)) for other in OTHERS)]
        )  # fmt: skip
    names = [NAMES[one] for one in ("fcca", *OTHERS)]
    return table(["adapted", "spread of inputs", "of errors", *names, *(f"gain over {one}" for one in names[1:])], rows)


def in_words(gains: Sequence[float]) -> str:
    return f"{np.mean(gains):+.3f} ± {half_interval(gains):.3f}"


def over_layers(study: Study) -> str:
    """The mean gain over the single layers with its 95 % interval, and the rank correlation of spread and gain."""
    single = study.single
    gains = [np.array([np.mean(study.gains(unit, other)) for unit in single]) for other in OTHERS]
    sides = {"inputs": lambda unit: study.of_side(unit, 0), "errors": lambda unit: study.of_side(unit, 1),
             "both": study.spread}  # fmt: skip
    rows = [["mean gain", *(in_words(gained) for gained in gains)]]
    for name, of_unit in sides.items():
        of_spread = np.array([[of_unit(unit)] for unit in single])
        rows.append([f"ρ with the spread of {name}", *(rank_interval(of_spread, gained[:, None]) for gained in gains)])
    return table([f"over {len(single)} single layers", *(f"gain over {NAMES[other]}" for other in OTHERS)], rows)


def figure(study: Study, file: Path) -> None:
    """The gain of every seed against the spread, a panel for each other constructor."""
    drawn, axes = plt.subplots(1, len(OTHERS), figsize=(10, 4), sharey=True, layout="constrained")
    for axis, other in zip(axes, OTHERS, strict=True):
        axis.axhline(0, color="grey", linewidth=0.8)
        for unit in study.units:
            alone = unit in study.single
            gains, at, colour = study.gains(unit, other), study.spread(unit), "tab:blue" if alone else "tab:orange"
            axis.plot([at] * len(gains), gains, "o" if alone else "s", color=colour, alpha=0.4, markersize=4)
            axis.plot([at], [np.mean(gains)], "_", color=colour, markersize=14, markeredgewidth=2)
            axis.annotate(unit, (at, float(np.mean(gains))), textcoords="offset points", xytext=(7, 3), fontsize=7)
        axis.set_xscale("log")
        axis.margins(x=0.2)
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("spread of inputs times spread of errors")
        axis.set_title(f"over {NAMES[other]}", fontsize=10)
    axes[0].set_ylabel("gain of FCCA, nats per answer token")
    drawn.suptitle("SmolLM2 on SST-2, cores on one layer (its number) or on a quarter of the layers", fontsize=10)
    drawn.savefig(file, dpi=160)
    plt.close(drawn)


def blocks(study: Study) -> dict[str, str]:
    """The generated blocks of docs/smollm2.md by name."""
    return {"whitening": losses(study), "whitening-layers": over_layers(study)}
