"""What ``tune`` writes beside a run, and the table of a sweep."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from frozencore.cli import figure_style
from frozencore.cli.tune import sweep_summary, write_learning
from frozencore.tune.run.record import Sweep, SweptRun
from made_up import made_up_record

SCORES = [{"step": 2, "held_out_loss": 0.5, "accuracy": 0.75}, {"step": 3, "held_out_loss": 0.4, "accuracy": 0.7}]
KEPT = {"every": 2, "rows": 70, "kept_step": 2, "by": "accuracy", "scores": SCORES, "time_s": 2.5}


@pytest.mark.parametrize("selection", [KEPT, None])
def test_every_step_has_its_line_and_the_figure_its_curves(
    selection: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figure_style, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 3, "final_loss": 1.0, "losses": [3.0, None, 1.0]}
    write_learning(made_up_record({"task": "svamp"}, training=training, selection=selection or ...), tmp_path)
    rows = list(csv.reader((tmp_path / "history.csv").read_text().splitlines()))
    scored = [["0.5", "0.75"], ["0.4", "0.7"]] if selection else [["", ""], ["", ""]]
    assert rows[0] == ["step", "loss", "validation_loss", "validation_accuracy"]
    assert rows[1:] == [["1", "3.0", "", ""], ["2", "", *scored[0]], ["3", "1.0", *scored[1]]]
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in drawn[0].axes[0].lines}
    assert curves["each step"] == [[1, 3], [3.0, 1.0]]
    assert curves.get("validation rows") == ([[2, 3], [0.5, 0.4]] if selection else None)


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
