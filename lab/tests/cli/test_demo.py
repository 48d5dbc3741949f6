"""The demo: what the shipped campaign asks for, and on few rows what it writes, prints and how it ends."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from frozencore.constructors import CONSTRUCTORS
from frozencore.tune.pocket import POCKET_TASKS
from frozencore_lab.cli import demo
from frozencore_lab.cli.demo import demo_campaign
from places import LAB

FEW = {"rank": 4, "calibration_size": 8, "epochs": 1, "num_train": 16, "num_evaluation": 10}


@pytest.fixture
def few_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped file with two tasks, two methods and few rows."""
    content = yaml.safe_load(demo.FILE.read_text())
    content["base"] |= FEW
    study = content["studies"]["demo"]
    study["axes"] |= {"task": ["pocket-sentiment", "pocket-math"], "method": ["random", "lora-r1"]}
    study["variants"] = {"lora-r1": study["variants"]["lora-r1"]}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(demo, "FILE", tmp_path / "few.yaml")


def test_every_constructor_and_lora_meet_on_every_pocket_task_with_one_seed() -> None:
    axes = demo_campaign(seed=7).studies["demo"].axes
    assert set(axes["task"]) == set(POCKET_TASKS)
    assert set(axes["method"]) == {*CONSTRUCTORS, "lora-r1", "lora"}
    assert axes["seed"] == (7,)


def test_the_shipped_file_lies_among_the_campaigns() -> None:
    assert (LAB / "campaigns" / "demo.yaml").read_bytes() == demo.FILE.read_bytes()


@pytest.mark.usefixtures("few_runs")
def test_a_demo_writes_a_report_with_curves_prints_what_each_method_was_worth_and_runs_once(
    command: Any, tmp_path: Path
) -> None:
    status, printed, _ = command("demo", "--output", tmp_path / "out", "--workers", "0", "--seed", "7")
    assert status == 0
    records = [json.loads(file.read_text()) for file in (tmp_path / "out" / "runs").glob("*/result.json")]
    assert {(r["task"], r["method"], r["seed"]) for r in records} == {
        (task, method, 7) for task in ("pocket-sentiment", "pocket-math") for method in ("random", "lora")
    }
    for record in records:
        assert f"{100 * record['accuracy']:.1f}" in printed
        assert f"{record['held_out_loss']:.3f}" in printed
    report = tmp_path / "out" / "report"
    assert {file.name for file in (report / "figures").iterdir()} == {"demo.png", "demo-curves.png", "demo-loss.png"}
    assert (report / "index.html").read_text().count("data:image/png;base64,") == 3
    assert "it ranks nothing" in " ".join(printed.split())

    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "runs").glob("*/result.json")}
    status, printed, _ = command("demo", "--output", tmp_path / "out", "--workers", "0", "--seed", "7")
    assert status == 0
    assert "4 runs finished" in printed
    assert times == {file: file.stat().st_mtime_ns for file in times}


@pytest.mark.slow
def test_the_demo_as_it_is_shipped_fills_its_table(command: Any, tmp_path: Path) -> None:
    status, printed, _ = command("demo", "--output", tmp_path / "out", "--workers", "2")
    assert status == 0
    count = prod(len(values) for values in demo_campaign(seed=42).studies["demo"].axes.values())
    assert f"{count} of {count} final runs have a result" in printed
