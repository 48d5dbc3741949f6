"""Advice as a figure: what settings would gain, and what a budget buys."""

from __future__ import annotations

from matplotlib.figure import Figure

from frozencore.advice.advise import Advice
from frozencore.cli.figure_style import NAVY, ORANGE, method_colour, plain_ticks, plt
from frozencore.tune.methods import bases_name

FIGURE = "advice.png"


def advice_figure(advice: Advice) -> Figure:
    """Bars of gains, the recommended setting framed; beside them the share of the agreed gradient by budget."""
    worths = [*reversed(advice.shapes), *reversed(advice.bases)]
    figure, (bars, curve) = plt.subplots(
        1, 2, figsize=(9.6, 1.2 + 0.26 * len(worths)), gridspec_kw={"width_ratios": [2, 1]}
    )
    names = [
        bases_name(worth.setting.method, worth.setting.options)
        + (f"; {worth.setting.on}, budget" if worth.setting.rank is None and worth in advice.shapes else "")
        for worth in worths
    ]
    drawn = bars.barh(names, [worth.gain for worth in worths], color=[method_colour(w.setting.method) for w in worths])
    drawn[worths.index(advice.recommended)].set(edgecolor=ORANGE, linewidth=2.5)
    bars.set_xlabel("gain on unseen rows, nats")
    bars.set_title("framed: recommended", fontsize=9, loc="left")
    bars.tick_params(labelsize=8)
    if advice.bought:
        curve.plot(list(advice.bought), list(advice.bought.values()), "o-", color=NAVY)
        curve.set_xscale("log")
        plain_ticks(curve.xaxis)
    curve.set_ylim(0, 1.02)
    curve.set_xlabel("trained values")
    curve.set_title("share of what the halves agree on", fontsize=9, loc="left")
    for axes in (bars, curve):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure
