"""The places that a campaign's commands use, and the screen while a campaign runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from frozencore.errors import ConfigError
from frozencore.tune.pocket import pocket_model_path
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.results import Tally
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place, Worker
from frozencore_lab.campaign.worker_pool import Event, LocalPool
from frozencore_lab.cli import campaign_lines as campaign_command
from frozencore_lab.cli.board import Board
from frozencore_lab.cli.campaign_lines import plan_lines, report_on_table
from places import PAPER_TABLES
from small_campaign import write_spec

PAPER = PAPER_TABLES / "paper_q3.csv"
ELSEWHERE = """
name: elsewhere
models: {big: org/big}
studies:
  main: {title: M, axes: {model: [big], task: [pocket-math], method: [random], seed: [42]}}
"""
JOB = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 43, "evaluate_on": "validation"})


def planned_with(models: dict[str, str], folder: Path) -> str:
    spec = write_spec(folder, ELSEWHERE)
    *_, last = plan_lines(spec, folder / "out", data_root=None, models=models, device="cpu")
    return str(last)


def test_a_model_path_stands_for_the_campaigns_model_of_that_name(tmp_path: Path) -> None:
    assert planned_with({"big": str(pocket_model_path())}, tmp_path).startswith("Estimate for the 1 run left")


def test_a_model_path_for_a_model_that_the_campaign_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model-path bog=...: the campaign's models are big\."):
        planned_with({"bog": str(pocket_model_path())}, tmp_path)


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
    assert isinstance(pool, LocalPool)
    assert pool.size == len(devices)
    assert [worker.place.device for worker in pool._workers] == devices


def test_a_comparison_is_shown_without_a_file_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO(), width=200)
    console.print(report_on_table(PAPER, "FCCA", None))
    assert "RawGrad" in console.file.getvalue()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def shown(tmp_path: Path, *, is_terminal: bool) -> str:
    """The screen of a campaign of four runs when one has failed and another is at 30 % of its training."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=150)
    with Board(console, Store(tmp_path)) as board:
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
