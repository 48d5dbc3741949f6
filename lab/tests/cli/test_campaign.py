"""``frozencore campaign`` and ``frozencore demo`` as a user calls them, and the screen while a campaign runs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from fixtures import LAB, PAPER_TABLES
from frozencore.constructors import CONSTRUCTORS
from frozencore.tune.pocket import pocket_model_path
from frozencore_lab.campaign.job import Place, make_job
from frozencore_lab.campaign.results import Tally
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import Event
from frozencore_lab.cli import campaign as verbs
from frozencore_lab.cli import campaign_lines as campaign_command
from frozencore_lab.cli.campaign import demo_campaign
from frozencore_lab.cli.campaign_lines import Board
from frozencore_lab.tasks.pocket_tasks import POCKET_TASKS
from small_campaign import write_spec

PAPER = PAPER_TABLES / "paper_q3.csv"
ONE_STUDY = """
name: one-study
models: {pocket: pocket}
base: {batch_size: 8, accumulation: 1, num_train: 16, num_evaluation: 8, epochs: 1, calibration_size: 16}
studies:
  main:
    title: Two methods
    axes: {model: [pocket], task: [pocket-sentiment, pocket-comparison], method: [fcca, random], seed: [42]}
    report: {reference: fcca, figure: ranking}
"""
Command = Callable[..., tuple[int, str, str]]
Call = Callable[..., str]


@pytest.fixture
def call(command: Command) -> Callable[..., str]:
    """Runs ``frozencore campaign`` and gives what it printed; with ``status``, its errors."""

    def run(*words: str, status: int = 0) -> str:
        came, out, err = command("campaign", *words)
        assert came == status, err
        return err if status == 2 else out

    return run


# A worker in a process started anew, as users have it, needs ten seconds for its imports.
@pytest.mark.parametrize("num_workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_plan_run_status_and_report(num_workers: str, call: Call, tmp_path: Path) -> None:
    spec, folder = str(write_spec(tmp_path, ONE_STUDY)), str(tmp_path / "out")
    planned = call("plan", spec, "--out", folder)
    assert "4 different runs" in planned
    assert "4 ready" in planned
    assert not Path(folder).exists()

    listed = call("plan", spec, "--out", folder, "--runs").splitlines()
    assert len([line for line in listed if " left main final model=pocket" in line]) == 4
    ids = call("plan", spec, "--out", folder, "--ids").split()
    assert len(set(ids)) == 4
    ran = call("run", spec, "--out", folder, "--workers", num_workers)
    assert "4 runs finished, 0 failed, 0 left" in ran
    assert {path.name for path in Path(folder, "runs").iterdir()} == set(ids)
    records = [json.loads(path.read_text()) for path in Path(folder, "runs").glob("*/result.json")]
    assert {record["provenance"]["num_threads"] for record in records} == {torch.get_num_threads()}

    assert "one-study: 4 done, 0 running, 0 failed, 0 left" in call("status", folder)
    assert "is finished already" in call("one", ids[0], "--out", folder)
    assert "4 of 4 final runs done" in call("report", folder)
    page = Path(folder, "report", "index.html").read_text(encoding="utf-8")
    assert "Two methods" in page
    assert "http" not in page.split("<body", 1)[-1].split("src=", 1)[0]


def test_one_makes_a_run_and_its_failure_is_one_line(call: Call, tmp_path: Path) -> None:
    text = ONE_STUDY.replace("task: [pocket-sentiment, pocket-comparison]", "task: [svamp, pocket-comparison]")
    spec, folder = str(write_spec(tmp_path, text)), str(tmp_path / "out")
    svamp = call("plan", spec, "--out", folder, "--ids").split()[0]
    call("run", spec, "--out", folder, "--workers", "0", "--data-root", str(tmp_path), status=1)
    failed = call("one", svamp, "--out", folder, "--data-root", str(tmp_path), status=2)
    assert "failed (bad input): Data set ChilleD/SVAMP must lie at" in failed
    assert len(failed.strip().splitlines()) == 1
    assert "2 done, 0 running, 2 failed, 0 left" in call("status", folder)


def test_a_table_of_task_means_is_analysed(call: Call, tmp_path: Path) -> None:
    shown = call("report", "--table", str(PAPER), "--reference", "FCCA", "--json", str(tmp_path / "a.json"))
    assert "RawGrad" in shown
    turned = call("report", "--table", str(PAPER), "--reference", "FCCA", "--lower-is-better")
    assert ("higher is better" in shown, "lower is better" in turned) == (True, True)
    assert json.loads((tmp_path / "a.json").read_text())


def test_a_model_of_the_campaign_may_lie_in_a_folder_that_the_command_names(call: Call, tmp_path: Path) -> None:
    text = ONE_STUDY.replace("{pocket: pocket}", "{pocket: nobody/has-this}").replace("reference: fcca, ", "")
    text = text.replace("[fcca, random]", "[random]")
    spec, folder = str(write_spec(tmp_path, text)), str(tmp_path / "out")
    run_id = call("plan", spec, "--out", folder, "--ids").split()[0]
    assert "nobody/has-this" in call("one", run_id, "--out", folder, status=2)
    made = call("one", run_id, "--out", folder, "--model-path", f"pocket={pocket_model_path()}")
    assert f"{run_id} finished" in made
    assert "1 left" in call("status", folder)


JOB = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 43, "evaluate_on": "validation"})


@pytest.mark.parametrize(
    ("num_gpus", "device", "num_workers", "devices"),
    [
        (2, "auto", None, ["cuda:0", "cuda:1"]),
        (2, "auto", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (2, "cuda:1", None, ["cuda:1"]),
        (2, "cpu", 2, ["cpu", "cpu"]),
        (0, "auto", 2, ["auto", "auto"]),
    ],
)
def test_every_gpu_gets_a_worker_unless_the_user_says_otherwise(
    num_gpus: int, device: str, num_workers: int | None, devices: list[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    pool = campaign_command._pool(Worker(Store(tmp_path), Place(device=device)), num_workers, None)
    assert pool.size == len(devices)
    assert [worker.place.device for worker in pool._workers] == devices


def shown(tmp_path: Path, *, is_terminal: bool) -> str:
    """The screen of a campaign of four runs when one has failed and another is at 30 % of its training."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=150)
    board = Board(console)
    with board.bars:
        board(Tally(finished=0, failed=0, ready=4, waiting=0), {0: JOB, 1: JOB}, None)
        board(Tally(0, 0, 4, 0), {0: JOB, 1: JOB}, Event(0, "stage", "train", 3, 10))
        board(Tally(0, 1, 3, 0), {0: JOB}, Event(1, "failed"))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_on_a_terminal_each_worker_has_a_line_with_its_run_and_how_far_it_is(tmp_path: Path) -> None:
    *_, line = (line for line in shown(tmp_path, is_terminal=True).splitlines() if "worker 0" in line)
    for word in ("pocket-math", "fcca", "seed 43", "search", "30%"):
        assert word in line
    assert "1 failed, 3 left" in shown(tmp_path, is_terminal=True)


def test_elsewhere_nothing_moves(tmp_path: Path) -> None:
    assert "worker" not in shown(tmp_path, is_terminal=False)


FEW = {"rank": 4, "calibration_size": 8, "epochs": 1, "num_train": 16, "num_evaluation": 10}


@pytest.fixture
def few_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped file with two tasks, two methods and few rows."""
    content = yaml.safe_load(verbs.DEMO_FILE.read_text())
    content["base"] |= FEW
    study = content["studies"]["demo"]
    study["axes"] |= {"task": ["pocket-sentiment", "pocket-math"], "method": ["random", "lora-r1"]}
    study["variants"] = {"lora-r1": study["variants"]["lora-r1"]}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(verbs, "DEMO_FILE", tmp_path / "few.yaml")


def test_every_constructor_and_lora_meet_on_every_pocket_task_with_one_seed() -> None:
    axes = demo_campaign(seed=7).studies["demo"].axes
    assert set(axes["task"]) == set(POCKET_TASKS)
    assert set(axes["method"]) == {*CONSTRUCTORS, "lora-r1", "lora"}
    assert axes["seed"] == (7,)


def test_the_shipped_file_lies_among_the_campaigns() -> None:
    assert (LAB / "campaigns" / "demo.yaml").read_bytes() == verbs.DEMO_FILE.read_bytes()


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
