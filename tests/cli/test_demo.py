"""The demo on two methods, two tasks and few rows: what it writes, what it prints, how it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from frozencore.cli import demo_runs as demo
from frozencore.cli.demo_runs import DEMO_METHODS, demo_configs, run_demo
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.lab.pocket import POCKET_TASKS
from frozencore.lab.reports.figures.demo import mean_accuracy
from made_up import made_up_record

TASKS, METHODS = ("pocket-sentiment", "pocket-math"), ("random", "lora")
FEW = {"rank": 4, "calibration_size": 8, "epochs": 1, "num_train": 16, "num_evaluation": 10}


def few_runs(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    configs = {
        cell: config.model_copy(update=FEW | changed)
        for cell, config in demo_configs(seed=7).items()
        if cell[0] in TASKS and cell[1] in METHODS
    }
    monkeypatch.setattr(demo, "demo_configs", lambda seed: configs)


def test_every_constructor_and_lora_meet_on_every_pocket_task_with_one_seed() -> None:
    configs = demo_configs(seed=7)
    assert set(configs) == {(task, method) for task in POCKET_TASKS for method in (*CONSTRUCTORS, "lora")}
    assert len(configs) == len(POCKET_TASKS) * len(DEMO_METHODS)
    assert {config.seed for config in configs.values()} == {7}
    assert {config.batch_size * config.accumulation for config in configs.values()} == {8}


def test_a_demo_writes_results_figure_and_page_and_prints_what_each_method_was_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_runs(monkeypatch)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "of an earlier demo").touch()
    printed = io.StringIO()
    results = run_demo(tmp_path, Console(file=printed, width=160), num_workers=2, seed=7)

    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert {(row["task"], row["method"]) for row in results} == {(task, method) for task in TASKS for method in METHODS}
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {f"{task}-{method}" for task in TASKS for method in METHODS}
    for row in results:
        record = json.loads((tmp_path / "runs" / f"{row['task']}-{row['method']}" / "result.json").read_text())
        assert row["accuracy"] == record["accuracy"]
        assert row["standard_error"] == record["score"]["standard_error"]

    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "index.html").read_text()
    assert page.count("<tr>") == 1 + len(results)
    assert "data:image/png;base64," in page
    text = printed.getvalue()
    assert "[4/4]" in text
    for row in results:
        worth = f"{100 * row['accuracy_before']:.1f} → {100 * row['accuracy']:.1f} %"
        assert f"] {row['task']} {row['method']}: {worth}" in text
    best, *_ = mean_accuracy(results)
    assert text[text.index("Mean over the tasks") :].index(best) > 0
    assert "it ranks nothing" in text


def test_a_run_that_cannot_be_ends_the_demo_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_runs(monkeypatch, device="no-such-device")
    with pytest.raises(ConfigError, match="no-such-device"):
        run_demo(tmp_path, Console(file=io.StringIO()), num_workers=1)
    assert not (tmp_path / "results.json").exists()


def test_a_terminal_sees_a_grid_of_stages_that_turn_into_accuracies() -> None:
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=True, width=160)
    cells = {cell: config for cell, config in demo_configs(7).items() if cell[0] in TASKS and cell[1] in METHODS}
    with demo._Board(console, cells) as board:
        board.show((TASKS[0], "lora"), "training", 3, 4)
        board.show((TASKS[1], "lora"), "loading", 0, None)
        board.finish((TASKS[0], "random"), made_up_record({"task": TASKS[0]}, accuracy_before=0.5, accuracy=0.75))
        board.show((TASKS[0], "random"), "training", 1, 4)  # news that comes late changes nothing
        console.print(board._render())
    grid = printed.getvalue()
    for word in ("training 75%", "loading", "50.0 → 75.0", "1/4"):
        assert word in grid
    assert "training 25%" not in grid


def test_means_over_different_tasks_are_not_compared() -> None:
    records = [{"task": "a", "method": "x", "accuracy": 1.0}, {"task": "b", "method": "y", "accuracy": 0.0}]
    with pytest.raises(ValueError, match=r"x lacks the tasks \['b'\]"):
        mean_accuracy(records)
