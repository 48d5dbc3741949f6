"""Show how well a basis fits the rows of tenants, or other rows, in tables and in words."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from frozencore.maths.groups import Share, mean_share
from frozencore.tune.run.basis_fit import HALF
from frozencore.words import num_of

MOST_TENANTS = 10  # rows of the table without --all-tenants
MOST = 0.75


def shares_table(shares: Mapping[str, Share], *, every_tenant: bool = False) -> Group:
    """Show the share of each tenant's whitened moment that the basis holds, worst first, and the mean."""
    worst_first = sorted(shares.items(), key=lambda item: item[1].of_own)
    shown = worst_first if every_tenant else worst_first[:MOST_TENANTS]
    table = Table(title=f"How well the basis fits {num_of(len(shares), 'tenant')}", title_justify="left")
    for heading in ("tenant", "basis", "own best", "basis of own best"):
        table.add_column(heading, justify="left" if heading == "tenant" else "right")
    mean = mean_share(shares.values())
    for name, share in shown:
        table.add_row(name, *_cells(share))
    table.add_section()
    table.add_row("mean", *_cells(mean))
    rest = len(shares) - len(shown)
    lines = [Text(f"The basis fits {rest:,} more tenants better (--all-tenants shows each).")] if rest else []
    said = (
        "Share of the whitened moment of a tenant's calibration rows, averaged over layers. own best: the best basis "
        f"of the same rank for this tenant alone. A random basis holds {mean.random:.2%}."
    )
    return Group(table, *lines, Text(said, style="dim"))


def _cells(share: Share) -> tuple[str, ...]:
    return tuple(f"{part:.1%}" for part in (share.held, share.own, share.of_own))


def served_in_words(share: Share, num_rows: int) -> str:
    """Say how much of some rows' whitened moment a basis holds, and how to hold more.

    The verdict changes half way and three quarters of the way from a random basis to the rows' own basis.
    """
    if share.way >= MOST:
        verdict = "That is most of the way from a random basis to the best one."
    elif share.way >= HALF:
        verdict = (
            "That is more than half of the way from a random basis to the best one. Including the rows in the "
            "calibration would raise the share."
        )
    else:
        verdict = (
            "That is less than half of the way from a random basis to the best one. To raise the share, add the rows "
            "to the --tenants of `frozencore calibrate`, or calibrate on them alone."
        )
    return (
        f"Share of the whitened moment of {num_of(num_rows, 'row')}, averaged over layers: the basis holds "
        f"{share.held:.1%}, the best basis of its rank {share.own:.1%}, a random one {share.random:.2%}. {verdict} A "
        "share describes a basis: on SmolLM2 shares did not show which tenants a basis serves badly "
        "(docs/many-cores.md)."
    )
