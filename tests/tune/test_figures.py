"""The curve that a training leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from frozencore.tune import figures
from frozencore.tune.figures import write_curve
from small_runs import made_up_record

SCORES = [{"step": 2, "held_out_loss": 0.5, "accuracy": 0.75}, {"step": 3, "held_out_loss": 0.4, "accuracy": 0.7}]
KEPT = {"every": 2, "rows": 70, "kept_step": 2, "by": "accuracy", "scores": SCORES, "time_s": 2.5}


@pytest.mark.parametrize("selection", [KEPT, None])
def test_every_step_and_score_is_a_point_of_the_curves(
    selection: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 3, "final_loss": 1.0, "losses": [3.0, None, 1.0]}
    losses = {"held_out_loss_before": 4.0, "held_out_loss": 1.5}
    write_curve(made_up_record({"task": "svamp"}, training=training, selection=selection or ..., **losses), tmp_path)
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in drawn[0].axes[0].lines}
    assert curves["each step"] == [[1, 3], [3.0, 1.0]]
    assert curves.get("validation rows") == ([[2, 3], [0.5, 0.4]] if selection else None)
    assert curves["held-out rows, before and after"] == [[0, 2 if selection else 3], [4.0, 1.5]]
    assert "smoothed" not in curves  # three steps show themselves


def test_a_long_run_has_a_smoothed_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 21, "losses": [float(step) for step in range(21)]}
    write_curve(made_up_record({"task": "svamp"}, training=training, held_out_loss_before=20.1), tmp_path)
    (smoothed,) = [line for line in drawn[0].axes[0].lines if line.get_label() == "smoothed"]
    assert list(smoothed.get_ydata()) == [0.5, *map(float, range(2, 21))]  # twenty groups; the first has two steps
