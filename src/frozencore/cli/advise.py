"""``frozencore advise``: the expected gain of bases, ranks and targets, as a table, lines and a figure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from frozencore.cli.console import console
from frozencore.cli.flags import OF_TRAINING, TakesOptions
from frozencore.tune.methods import bases_name
from frozencore.tune.methods.bases_config import GROUPS
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.refuse_early import refuse_early
from frozencore.tune.run.run_folder import ADVICE, require_new
from frozencore.tune.scoring.scoring_config import ScoringConfig
from frozencore.words import num_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from frozencore.advice.advise import Advice
    from frozencore.advice.trials import Worth

OF_SCORING = ScoringConfig.model_fields.keys() | {"num_evaluation", "paper_steps"}
FIGURE = "advice.png"


def _advise(
    config: RunConfig,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="New folder for advice.json and advice.png.")
    ] = None,
) -> None:
    refuse_early(config)
    if output is not None:
        require_new(output, ADVICE)
    from frozencore.cli.display import StageDisplay

    with StageDisplay(console) as progress:
        from frozencore.advice.advice_run import execute_advice

        progress.started()
        advice = execute_advice(config, output, progress)
    console.print(_table(advice))
    for line in _lines(config, advice):
        console.print(line, soft_wrap=True)
    if output is not None:
        from frozencore.tune.figure_style import save_figure

        save_figure(_figure(advice), output / FIGURE)
        console.print(f"Record: {output / ADVICE}   Figure: {output / FIGURE}")


def _table(advice: Advice) -> Table:
    """The gain of each setting; the recommended one is bold."""
    title = f"Gain of a first step on unseen rows, whose loss is {advice.base_loss:.3f} nats"
    table = Table(title=title, title_justify="left")
    for heading in ("bases", "layers", "ranks"):
        table.add_column(heading)
    for heading in ("trained values", "gain, nats"):
        table.add_column(heading, justify="right")
    for part in (advice.bases, advice.shapes):
        for worth in part:
            table.add_row(*_cells(worth), style="bold" if worth is advice.recommended else "")
        table.add_section()
    return table


def _cells(worth: Worth) -> tuple[str, ...]:
    low, high = min(worth.ranks.values()), max(worth.ranks.values())
    ranks = str(low) if low == high else f"{low} to {high}"
    layers = "as asked" if worth.setting.on == "asked" else worth.setting.on
    name = bases_name(worth.setting.method, worth.setting.options)
    return name, layers, ranks, f"{worth.num_values:,}", f"{worth.gain:.4f}"


def _lines(config: RunConfig, advice: Advice) -> Iterator[str]:
    """Yield lines on the data, the value of budgets, the cost of the advice, and the recommendation."""
    from frozencore.advice.advice_run import flags_of

    spreads = advice.spreads
    yield (
        "Outlier channels (largest over median second moment) in the median layer: inputs "
        f"{spreads.median_a:.3g}, output errors {spreads.median_d:.3g}; in the worst layer: inputs "
        f"{spreads.largest_a:.3g}, output errors {spreads.largest_d:.3g}."
    )
    yield (
        f"Noise: two halves of the rows agree on {advice.num_agreed:g} of the {advice.num_looked_at} leading whitened "
        "directions of the median layer."
    )
    if advice.bought:
        shares = ", ".join(f"{budget:,} values {share:.0%}" for budget, share in advice.bought.items())
        yield f"Share of the agreed gradient that a budget can hold: {shares}."
    yield (
        f"{num_of(advice.num_rows, 'row')}: this took {advice.passes:.1f} times as much processor time as `calibrate` "
        f"takes to read them, {advice.time_s:.1f} s in all. Ranks and LoRA cannot be compared this way: docs/advise.md."
    )
    yield f"Recommended: {flags_of(config, advice.recommended.setting)}"


def _figure(advice: Advice) -> Figure:
    """Draw the gains as bars, the recommended setting framed, and the share of the gradient that a budget holds."""
    from frozencore.tune.figure_style import BLACK, NAVY, method_colour, plain_ticks, plt

    worths = [*reversed(advice.shapes), *reversed(advice.bases)]
    figure, (bars, curve) = plt.subplots(
        1, 2, figsize=(9.6, 1.2 + 0.26 * len(worths)), gridspec_kw={"width_ratios": [2, 1]}
    )
    names = [
        bases_name(worth.setting.method, worth.setting.options)
        + (f"; {worth.setting.on}, budget" if worth.setting.rank is None and worth in advice.shapes else "")
        for worth in worths
    ]
    bars.barh(
        range(len(worths)), [worth.gain for worth in worths], color=[method_colour(w.setting.method) for w in worths]
    )
    bars.set_yticks(range(len(worths)), names)
    framed = worths.index(advice.recommended)  # the whole row: a bar may be short, and of any colour
    bars.axhspan(framed - 0.47, framed + 0.47, fill=False, edgecolor=BLACK, linewidth=1.5, clip_on=False)
    bars.set_xlabel("gain on unseen rows, nats")
    bars.set_title("framed: recommended", fontsize=9, loc="left")
    bars.tick_params(labelsize=8)
    if advice.bought:
        curve.plot(list(advice.bought), list(advice.bought.values()), "o-", color=NAVY)
        curve.set_xscale("log")
        plain_ticks(curve.xaxis)
    curve.set_ylim(0, 1.02)
    curve.set_xlabel("trained values")
    curve.set_title("share of the agreed gradient", fontsize=9, loc="left")
    for axes in (bars, curve):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


advise = TakesOptions(_advise, without={*OF_TRAINING, *OF_SCORING, *GROUPS["core"](), "method", "memory_budget"})
