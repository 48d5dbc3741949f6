"""What a basis holds of the rows of tenants, or of a newcomer, in tables and in words."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.maths.groups import Share, mean_share
from frozencore.words import num_of

MOST_TENANTS = 10  # lines of the table, unless all are asked for
MOST, HALF = 0.75, 0.5


def shares_table(shares: Mapping[str, Share], *, every_tenant: bool = False) -> Group:
    """The share that the basis holds of what each tenant wants, the worst served first, and their mean."""
    worst_first = sorted(shares.items(), key=lambda item: item[1].of_own)
    shown = worst_first if every_tenant else worst_first[:MOST_TENANTS]
    table = Table(title=f"What the basis holds of {num_of(len(shares), 'tenant')}", title_justify="left")
    for heading in ("tenant", "basis", "own best", "basis of own best"):
        table.add_column(heading, justify="left" if heading == "tenant" else "right")
    mean = mean_share(shares.values())
    for name, share in shown:
        table.add_row(name, *_cells(share))
    table.add_section()
    table.add_row("mean", *_cells(mean))
    rest = len(shares) - len(shown)
    lines = [Text(f"{rest:,} more are served better (--all-tenants shows each).")] if rest else []
    said = (
        "Shares of the whitened moment of each tenant's calibration rows, in the mean over layers; own best: the best "
        f"basis of the same rank for that tenant alone. A random basis holds {mean.random:.2%}."
    )
    return Group(table, *lines, Text(said, style="dim"))


def _cells(share: Share) -> tuple[str, ...]:
    return tuple(f"{part:.1%}" for part in (share.held, share.own, share.of_own))


def served_in_words(share: Share, num_rows: int) -> str:
    """What a basis holds of some rows, and what can be done if that is little.

    The words change half way and three quarters of the way from a random basis to the rows' own.
    """
    room = share.own - share.random
    way = (share.held - share.random) / room if room > 0 else 1.0
    if way >= MOST:
        verdict = "The basis holds most of what a basis of their own would."
    elif way >= HALF:
        verdict = (
            "The basis holds more than half of what a basis of their own would; one that is chosen for them as well "
            "holds more."
        )
    else:
        verdict = (
            "The basis holds less than half of what a basis of their own would: put them among the --tenants of "
            "`frozencore calibrate`, or calibrate on them alone."
        )
    return (
        f"Of the whitened moment of {num_of(num_rows, 'row')}, in the mean over layers, the basis holds "
        f"{share.held:.1%}, the best basis of its rank {share.own:.1%}, a random one {share.random:.2%}. {verdict}"
    )
