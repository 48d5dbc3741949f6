"""The words for the share that a basis holds, on known shares."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from frozencore.cli.shares import served_in_words, shares_table
from frozencore.maths.groups import Share


def shown(shares: dict[str, Share], *, every: bool) -> list[str]:
    console = Console(width=120, file=io.StringIO())
    console.print(shares_table(shares, every_tenant=every))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_ten_that_are_served_worst_stand_first_unless_all_are_asked_for() -> None:
    # t0 holds least, but as much as it could; t13 holds half of what it could
    shares = {f"t{i}": Share(0.1 + i / 100, (0.1 + i / 100) / (1 - i / 26), 0.015) for i in range(14)}
    named = {every: [name for line in shown(shares, every=every) if (name := line.strip("│ ").split(" ")[0]) in shares]
             for every in (False, True)}  # fmt: skip
    worst_first = [f"t{i}" for i in reversed(range(14))]
    assert named == {False: worst_first[:10], True: worst_first}
    text = "\n".join(shown(shares, every=False))
    assert "The basis fits 4 more tenants better (--all-tenants shows each)." in text
    assert re.search(r"mean *│ *16.5% ", text)
    assert re.search(r"t13 *│ *23.0% *│ *46.0% *│ *50.0%", text)
    assert "A random basis holds 1.50%." in text


@pytest.mark.parametrize(
    ("held", "verdict"),
    [
        (0.79, "most of the way from a random basis to the best one."),
        (0.70, "more than half"),
        (
            0.50,
            "less than half of the way from a random basis to the best one. To raise the share, add",
        ),
    ],
)
def test_the_words_count_from_a_random_basis_up(held: float, verdict: str) -> None:
    # .4 is random and .9 the best, so .5 is a fifth of the way although more than half of .9
    said = served_in_words(Share(held, 0.9, 0.4), 64)
    assert verdict in said
    assert f"64 rows, averaged over layers: the basis holds {held:.1%}, the best basis of its rank 90.0%" in said
