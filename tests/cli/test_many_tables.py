"""Tables of what trained side by side."""

from __future__ import annotations

import pytest
from rich.console import Console

from frozencore.cli.many_tables import sweep_summary
from frozencore.tune.run.record import Sweep, SweptRun


@pytest.mark.parametrize(
    ("losses", "is_marked"),
    [([3.0, 2.0, 1.0], True), ([1.0, 2.0, 3.0], True), ([2.0, 1.0, 3.0], False), ([2.0, 1.0, None], False)],
)
def test_a_sweep_says_that_its_best_rate_is_an_end_of_those_tried(
    losses: list[float | None], is_marked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate beyond it that diverges makes it no end."""
    runs = [
        SweptRun(options={"learning_rate": 10.0**-power, "seed": seed}, held_out_loss=loss and loss + seed)
        for power, loss in zip((4, 3, 2), losses, strict=True)
        for seed in (0, 1)
    ]
    ended = {number: run.held_out_loss for number, run in enumerate(runs) if run.held_out_loss is not None}
    sweep = Sweep(rows=8, runs=tuple(runs), best=min(ended, key=ended.__getitem__))
    Console(width=100).print(sweep_summary(sweep))
    shown = " ".join(capsys.readouterr().out.split())
    assert ("best †" in shown, "a better one may lie beyond it" in shown) == (is_marked, is_marked)


def test_a_sweep_of_seeds_has_no_rates_to_mark(capsys: pytest.CaptureFixture[str]) -> None:
    runs = tuple(SweptRun(options={"seed": seed}, held_out_loss=float(seed)) for seed in (1, 2))
    Console(width=100).print(sweep_summary(Sweep(rows=8, runs=runs, best=0)))
    assert "†" not in capsys.readouterr().out
