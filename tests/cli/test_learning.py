"""A run's folder shows how it learned."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from frozencore.cli import learning
from made_up import made_up_record

SCORES = [{"step": 2, "held_out_loss": 0.5, "accuracy": 0.75}, {"step": 3, "held_out_loss": 0.4, "accuracy": 0.7}]
KEPT = {"every": 2, "rows": 70, "kept_step": 2, "by": "accuracy", "scores": SCORES, "time_s": 2.5}


@pytest.mark.parametrize("selection", [KEPT, None])
def test_every_step_has_its_line_and_the_figure_its_curves(
    selection: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(learning, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 3, "final_loss": 1.0, "losses": [3.0, None, 1.0]}
    learning.write_learning(made_up_record({"task": "svamp"}, training=training, selection=selection or ...), tmp_path)
    rows = list(csv.reader((tmp_path / "history.csv").read_text().splitlines()))
    scored = [["0.5", "0.75"], ["0.4", "0.7"]] if selection else [["", ""], ["", ""]]
    assert rows[0] == ["step", "loss", "validation_loss", "validation_accuracy"]
    assert rows[1:] == [["1", "3.0", "", ""], ["2", "", *scored[0]], ["3", "1.0", *scored[1]]]
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in drawn[0].axes[0].lines}
    assert curves["each step"] == [[1, 3], [3.0, 1.0]]
    assert curves.get("validation rows") == ([[2, 3], [0.5, 0.4]] if selection else None)
