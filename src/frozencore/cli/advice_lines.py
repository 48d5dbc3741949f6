"""Advice on the screen: a table, what was seen, and one line of recommendation."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from frozencore.advice.advise import Advice
from frozencore.advice.trials import Worth
from frozencore.tune.methods import bases_name
from frozencore.tune.run.advising import flags_of
from frozencore.tune.run.config import RunConfig
from frozencore.words import num_of


def advice_lines(config: RunConfig, advice: Advice) -> Iterator[str | Table]:
    """What ``frozencore advise`` prints, line by line."""
    yield _table(advice)
    seen = advice.spreads
    yield (
        f"Outlier channels, largest over median second moment, median layer (largest): inputs {seen.median_a:.3g} "
        f"({seen.largest_a:.3g}), output errors {seen.median_d:.3g} ({seen.largest_d:.3g})."
    )
    yield (
        f"Noise: of the {advice.num_looked_at} leading whitened directions of the median layer, the halves agree on "
        f"{advice.num_agreed:g}."
    )
    if advice.bought:
        shares = ", ".join(f"{budget:,} values {share:.0%}" for budget, share in advice.bought.items())
        yield f"What a budget holds of the gradient that the halves agree on: {shares}."
    yield (
        f"{num_of(advice.num_rows, 'row')}, {advice.passes:.1f} forward and backward passes over them, "
        f"{advice.time_s:.1f} s. Ranks and LoRA cannot be compared this way: docs/advise.md."
    )
    yield f"Recommended: {flags_of(config, advice.recommended.setting)}"


def _table(advice: Advice) -> Table:
    title = f"What a first step gains on rows that it has not seen, of {advice.base_loss:.3f} nats"
    table = Table(title=title, title_justify="left")
    for heading in ("bases", "layers", "ranks"):
        table.add_column(heading)
    for heading in ("trained values", "gain, nats"):
        table.add_column(heading, justify="right")
    for part in (advice.bases, advice.shapes):
        for worth in part:
            style = "bold" if worth is advice.recommended else ""
            table.add_row(*_cells(worth), style=style)
        table.add_section()
    return table


def _cells(worth: Worth) -> tuple[str, ...]:
    low, high = min(worth.ranks.values()), max(worth.ranks.values())
    ranks = str(low) if low == high else f"{low} to {high}"
    on = "as asked" if worth.setting.on == "asked" else worth.setting.on
    name = bases_name(worth.setting.method, worth.setting.options)
    return name, on, ranks, f"{worth.num_values:,}", f"{worth.gain:.4f}"
