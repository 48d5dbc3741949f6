"""What a training leaves to look at: a line for each step, and the curve."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from frozencore.tune import figures
from frozencore.tune.figures import write_learning
from made_up import made_up_record

SCORES = [{"step": 2, "held_out_loss": 0.5, "accuracy": 0.75}, {"step": 3, "held_out_loss": 0.4, "accuracy": 0.7}]
KEPT = {"every": 2, "rows": 70, "kept_step": 2, "by": "accuracy", "scores": SCORES, "time_s": 2.5}


@pytest.mark.parametrize("selection", [KEPT, None])
def test_every_step_has_its_line_and_the_figure_its_curves(
    selection: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 3, "final_loss": 1.0, "losses": [3.0, None, 1.0]}
    write_learning(made_up_record({"task": "svamp"}, training=training, selection=selection or ...), tmp_path)
    rows = list(csv.reader((tmp_path / "history.csv").read_text().splitlines()))
    scored = [["0.5", "0.75"], ["0.4", "0.7"]] if selection else [["", ""], ["", ""]]
    assert rows[0] == ["step", "loss", "validation_loss", "validation_accuracy"]
    assert rows[1:] == [["1", "3.0", "", ""], ["2", "", *scored[0]], ["3", "1.0", *scored[1]]]
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in drawn[0].axes[0].lines}
    assert curves["each step"] == [[1, 3], [3.0, 1.0]]
    assert curves.get("validation rows") == ([[2, 3], [0.5, 0.4]] if selection else None)
    assert "smoothed" not in curves  # three steps show themselves


def test_a_long_run_has_a_smoothed_curve_and_no_number_touches_the_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    training = {"num_steps": 21, "losses": [float(step) for step in range(21)]}
    write_learning(made_up_record({"task": "svamp"}, training=training, held_out_loss_before=20.1), tmp_path)
    axes = drawn[0].axes[0]
    (smoothed,) = [line for line in axes.lines if line.get_label() == "smoothed"]
    assert list(smoothed.get_ydata()) == [0.5, *map(float, range(2, 21))]  # twenty groups; the first has two steps
    drawn[0].canvas.draw()
    (title,) = [text for text in axes.findobj(Text) if text.get_text() == axes.get_title(loc="left")]
    assert not any(text.get_window_extent().overlaps(title.get_window_extent()) for text in axes.texts)
    assert not any("." in text.get_text() for text in axes.get_xticklabels())


@pytest.mark.parametrize(("selection", "last"), [(None, 6), (KEPT, 2)])
def test_the_figure_has_the_held_out_loss_before_and_after(
    selection: dict[str, object] | None, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    record = made_up_record(
        {"task": "svamp"}, training={"num_steps": 6, "losses": [3.0] * 6}, selection=selection or ...,
        held_out_loss_before=4.0, held_out_loss=1.5,
        resolved={"targets": "all-linear", "recipe": {}, "max_length": 9},
    )  # fmt: skip
    write_learning(record, tmp_path)
    axes = drawn[0].axes[0]
    curves = {line.get_label(): [list(axis) for axis in line.get_data()] for line in axes.lines}
    assert curves["held-out rows, before and after"] == [[0, last], [4.0, 1.5]]
    assert {text.get_text() for text in axes.texts} == {"4.000", "1.500"}
    upright = [line.get_xdata()[0] for line in axes.lines if line.get_color() == figures.GREY]
    assert upright == ([last] if selection else [])
    assert "mean of a twentieth" not in curves
