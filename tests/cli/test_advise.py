"""``frozencore advise``: what it prints and writes, and that what it recommends can be trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from frozencore.tune import figure_style
from frozencore.tune.pocket import pocket_model_path

Command = Callable[..., tuple[int, str, str]]
ASKED = ["--model", pocket_model_path(), "--task", "pocket-sentiment"]


def test_a_table_a_record_a_figure_and_a_line_that_tune_understands(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = figure_style.save_figure
    monkeypatch.setattr(figure_style, "save_figure", lambda figure, path: (figures.append(figure), save(figure, path)))
    words = [*ASKED, "--rank", 4, "--calibration-size", 32, "--output", tmp_path / "advice"]
    status, out, err = command("advise", *words)
    assert status == 0, err
    record = json.loads((tmp_path / "advice" / "advice.json").read_text())
    assert (tmp_path / "advice" / "advice.png").stat().st_size > 10_000
    line = out.split("Recommended: ")[1].splitlines()[0]
    assert line == record["recommended"]["flags"]
    assert all(f"{row['gain']:.4f}" in out for row in record["bases"])
    _require_frame(figures[0], record["recommended"])
    assert f"two halves of the rows agree on {record['num_agreed']:g}" in out.replace("\n", " ")
    status, out, err = command("tune", *ASKED, *line.split(), "--output", tmp_path / "run", "--dry-run")
    assert status == 0, err
    status, _, err = command("advise", *words)
    assert status == 2
    assert "already holds advice. Choose another --output" in err


def test_the_first_line_comes_before_torch_is_imported(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "frozencore.advice.advice_run", None)
    with pytest.raises(ModuleNotFoundError):
        command("advise", *ASKED)
    assert capsys.readouterr().out.startswith("Start: imports and checks\n")


def _require_frame(figure: Figure, recommended: dict[str, Any]) -> None:
    """One frame, of a colour that no bar has, around the bar of the recommended gain and no other."""
    axes = figure.axes[0]
    assert "framed: recommended" in axes.get_title(loc="left")
    (frame,) = [patch for patch in axes.patches if not patch.get_fill()]
    bars = [patch for patch in axes.patches if patch.get_fill()]
    inside = [
        bar
        for bar in bars
        if frame.get_y() < bar.get_y() and bar.get_y() + bar.get_height() < frame.get_y() + frame.get_height()
    ]
    assert [bar.get_width() for bar in inside] == [recommended["gain"]]
    assert frame.get_edgecolor() not in {bar.get_facecolor() for bar in bars}
    assert frame.get_linewidth() > 1
