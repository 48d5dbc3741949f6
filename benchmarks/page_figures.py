"""The figures of the pages, in colours that colour-blind readers can tell apart (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from cost_tables import SWEPT, over_floor, rows_of_steps, rows_of_sweep
from tenant_tables import BASIS, CORE, LORA, LORA_R16, share_of_base

GREY, BLUE, ORANGE, BLACK = "#999999", "#0072B2", "#E69F00", "#222222"
FOUR = ("#56B4E9", BLUE, ORANGE, "#D55E00")
OURS: dict[str, Any] = {"color": ORANGE, "marker": "o", "ms": 4}
THEIRS: dict[str, Any] = {"color": BLUE, "marker": "s", "ms": 3}
Found = Mapping[str, Any]


def growth(found: Found, path: Path) -> None:
    """Calibration against each letter, seconds; a step against rank and targets, over its floor."""
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 6))
    for axis, (name, word) in zip(axes.flat, SWEPT.items(), strict=False):
        rows = rows_of_sweep(found, name)
        _calibration_panel(axis, [row[name] for row in rows], rows, word)
    _step_panel(axes.flat[4], rows_of_steps(found, "rank"), "rank")
    _step_panel(axes.flat[5], rows_of_steps(found, "targets"), "targets")
    for index in (0, 4):
        axes.flat[index].legend(fontsize=8, frameon=False)
    _save(figure, path)


def scale(found: Found, path: Path) -> None:
    """Held-out loss by rate, a line a rank: two panels for each model and targets, of the same trainings, by the rate
    that they are worth at a scale of 1 and by the rate that they were given at 16/r. Rank budgets are left out."""
    plain = [row for row in found["rows"] if row["rank"] is not None and row["alpha"] is not None]
    models = list(dict.fromkeys(row["model"] for row in plain))
    targets = list(dict.fromkeys(row["targets"] for row in plain))[::-1]
    figure, axes = plt.subplots(len(models), 2 * len(targets), figsize=(12, 3 * len(models)), squeeze=False)
    for line, model in enumerate(models):
        for number, where in enumerate(targets):
            own = [row for row in plain if (row["model"], row["targets"]) == (model, where)]
            left, right = axes[line][2 * number : 2 * number + 2]
            right.sharey(left)
            for axis, scaled in ((left, False), (right, True)):
                _rates_panel(axis, own, found["rates"][model], scaled=scaled)
                axis.set_title(f"{model}, {where}, s = {'16/r' if scaled else '1'}", fontsize=9)
    axes[0][0].legend(fontsize=8, frameon=False, title="rank", title_fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("learning rate", fontsize=8)
    for line in axes:
        line[0].set_ylabel("held-out nats a token", fontsize=8)
    _save(figure, path)


def _rates_panel(axis: Axes, rows: Sequence[Found], rates: Sequence[float], *, scaled: bool) -> None:
    lowest = [min(loss for loss in row["losses"] if loss is not None) for row in rows]
    height = max(max(lowest) - min(lowest), 0.01)
    for row, colour in zip(sorted(rows, key=lambda row: row["rank"]), FOUR, strict=False):
        x = [rate if scaled else rate * row["alpha"] / row["rank"] for rate in rates]
        points = [(rate, loss) for rate, loss in zip(x, row["losses"], strict=True) if loss is not None]
        best = min(points, key=lambda point: point[1])
        axis.plot(*zip(*points, strict=True), color=colour, lw=1.2, marker="o", ms=3, mfc="white", label=row["rank"])
        axis.plot(*best, color=colour, marker="o", ms=6)
    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(min(lowest) - 0.1 * height, max(lowest) + 0.6 * height)


def tenants(found: Found, many: Found, path: Path) -> None:
    """Bytes a tenant on disk and in memory, and processor time of its training step, against the number of tenants."""
    kept = found["keep"]
    disk, counts = kept["disk_bytes"], [row["tenants"] for row in kept["bank"]]
    basis, a_lora = disk["basis"], kept["adapters"][LORA_R16]["resident_bytes_each"]
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.3))
    on_disk = [disk[CORE] + basis / n for n in counts]
    axes[0].plot(counts, on_disk, label="core, and its share of the basis", **OURS)
    axes[0].plot(counts, [disk[LORA_R16]] * len(counts), label=LORA_R16, **THEIRS)
    axes[0].set_title("bytes a tenant on disk", fontsize=10)
    in_bank = [(row["resident_bytes"] + basis) / row["tenants"] for row in kept["bank"]]
    axes[1].plot(counts, in_bank, label="core in a bank, and the basis", **OURS)
    axes[1].plot(counts, [a_lora] * len(counts), label=LORA_R16, **THEIRS)
    axes[1].set_title("bytes a tenant in memory", fontsize=10)
    own = [row["tenants"] for row in many["growth"]]
    alone = next(row for row in many["rows"] if row["model"] == "pocket" and row["rows_a_step"] == 1)["tenant_step_s"]
    steps = [1e3 * row["tenant_step_s"] for row in many["growth"]]
    axes[2].plot(own, steps, label="core, trained in company", **OURS)
    for name, label, style in (
        ("LoRA one after the other", "LoRA one after the other", THEIRS),
        ("floor", "floor of 32 at once", {"color": GREY, "ls": "--"}),
    ):
        axes[2].plot(own, [1e3 * alone[name]] * len(own), label=label, **style)
    axes[2].set_title("ms a tenant's training step (pocket)", fontsize=10)
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("tenants", fontsize=8)
        axis.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1, 0.92))
    axes[2].set_yticks([5, 10, 20], ["5", "10", "20"])
    axes[2].yaxis.set_minor_formatter(NullFormatter())
    _save(figure, path)


def served(found: Found, path: Path) -> None:
    """Share of the base model's tokens a second by tenants in a batch, and bytes a slot."""
    counts = found["plan"]["tenants"]
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.0), width_ratios=[3, 2])
    for shift, engine, colour in ((-0.2, BASIS, ORANGE), (0.2, LORA, BLUE)):
        middles, lows, highs = zip(*(share_of_base(found, engine, count) for count in counts), strict=True)
        around = [[m - low for m, low in zip(middles, lows, strict=True)],
                  [high - m for m, high in zip(middles, highs, strict=True)]]  # fmt: skip
        places = [place + shift for place in range(len(counts))]
        axes[0].bar(places, middles, 0.38, yerr=around, color=colour, ecolor=GREY, label=engine)
    axes[0].axhline(1, color=GREY, ls="--", lw=1)
    axes[0].set_xticks(range(len(counts)), [str(count) for count in counts])
    axes[0].set_xlabel("tenants in a batch of 64 rows", fontsize=8)
    axes[0].set_title("tokens a second over the base model's", fontsize=10)
    axes[0].set_ylim(0, 1.3)
    axes[0].legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    sizes = [found["adapter"][engine]["slot_bytes"] / 1e3 for engine in (BASIS, LORA)]
    bars = axes[1].bar([BASIS, LORA], sizes, 0.5, color=[ORANGE, BLUE])
    axes[1].bar_label(bars, [f"{size:,.0f}" for size in sizes], fontsize=8)
    axes[1].set_title("kB a slot in the engine", fontsize=10)
    _save(figure, path)


def _calibration_panel(axis: Axes, x: Sequence[int], rows: Sequence[Found], word: str) -> None:
    whole = [row["collect_s"] + row["build_s"] for row in rows]
    axis.plot(x, whole, color=ORANGE, marker="o", ms=4, label="calibration, all of it")
    axis.plot(x, [row["collect_s"] for row in rows], color=BLUE, marker="s", ms=3, label="pass with sums")
    axis.plot(x, [row["floor_s"] for row in rows], color=GREY, marker="^", ms=3, label="plain pass (floor)")
    axis.plot(x, [row["build_s"] for row in rows], color=BLACK, marker="v", ms=3, ls=":", label="bases")
    _doubling(axis, x)
    axis.set_yscale("log")
    axis.set_title(f"calibration: {word}", fontsize=10)
    axis.set_ylabel("seconds of CPU", fontsize=8)


def _step_panel(axis: Axes, rows: Sequence[Found], name: str) -> None:
    x = [row["rank"] for row in rows] if name == "rank" else list(range(len(rows)))
    for contestant, label, colour in (("lora", "LoRA", BLACK), ("frozencore", "frozen core", ORANGE)):
        axis.plot(x, [over_floor(row, contestant) for row in rows], color=colour, marker="o", ms=4, label=label)
    axis.axhline(1, color=GREY, lw=1)
    if name == "rank":
        _doubling(axis, x)
    else:
        axis.set_xticks(x, [row["targets"] for row in rows])
    axis.set_title(f"training step: {name}", fontsize=10)
    axis.set_ylabel("over its floor", fontsize=8)


def _doubling(axis: Axes, x: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, [str(value) for value in x])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _save(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
