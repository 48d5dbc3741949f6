"""``tune`` by several processes of ``torchrun``: one run, the result of one process, printed and written once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from frozencore.errors import ConfigError
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.process_group import process_group
from frozencore.tune.processes import is_first, num_started, refuse_several
from frozencore.tune.training.recipe import Recipe

PYTHON = [sys.executable, "-W", "ignore", "-m"]
TWO = [*PYTHON, "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
ASKED = [
    "--model", str(pocket_model_path()), "--task", "pocket-sentiment", "--num-train", "96", "--num-evaluation", "20",
    "--epochs", "2", "--lr", "1e-2", "--device", "cpu", "--calibration-size", "40",
]  # fmt: skip


def tune(started: list[str], out: Path, *more: str, status: int = 0) -> str:
    """The printed text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*started, "frozencore", "tune", *ASKED, "--bits", "32", *more, "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (done.returncode != 0) == (status != 0), done.stderr
    return done.stdout + done.stderr if status else done.stdout


def of(run: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    without_id = {re.sub("core_[0-9a-f]{32}", "core", name): tensor for name, tensor in tensors.items()}
    return without_id, json.loads((run / "result.json").read_text())


def same_to_rounding(one_run: Path, other_run: Path) -> None:
    (one, alone), (two, together) = of(one_run), of(other_run)
    assert one.keys() == two.keys()
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 2e-4
    assert one["frozencore_core"].any()
    assert together["training"]["num_steps"] == alone["training"]["num_steps"]
    assert together["training"]["losses"] == pytest.approx(alone["training"]["losses"], rel=1e-3)
    assert together["held_out_loss"] == pytest.approx(alone["held_out_loss"], rel=1e-3)
    assert together["held_out_loss_before"] == alone["held_out_loss_before"]
    assert together["rows"] == alone["rows"]
    assert together["resolved"] == alone["resolved"]
    assert ("processes" in alone, together["processes"]) == (False, 2)
    assert sorted(path.name for path in one_run.iterdir()) == sorted(path.name for path in other_run.iterdir())


@pytest.mark.slow
def test_two_processes_give_the_adapter_and_the_losses_of_one_to_rounding_and_say_it_once(tmp_path: Path) -> None:
    tune(PYTHON, tmp_path / "one")
    printed = tune(TWO, tmp_path / "two")
    assert printed.count("Adapter: ") == 1
    assert printed.count("Calibrate: ") == 1
    same_to_rounding(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("count", [33, 37])
def test_two_processes_train_as_one_where_the_rows_fill_no_whole_step(count: int, tmp_path: Path) -> None:
    tune(PYTHON, tmp_path / "one", "--num-train", str(count), "--batch-size", "4", "--accumulation", "2")
    tune(TWO, tmp_path / "two", "--num-train", str(count), "--batch-size", "4", "--accumulation", "2")
    same_to_rounding(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_processes_choose_the_basis_of_one_to_rounding(tmp_path: Path) -> None:
    few = [word for word in ASKED if word not in ("--epochs", "2", "--lr", "1e-2")]
    for started, name in ((PYTHON, "one"), (TWO, "two")):
        words = [*started, "frozencore", "calibrate", *few, "--out", str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Basis: ") == 1
    one, two = (load_file(tmp_path / name / "basis" / "basis.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-3


@pytest.mark.slow
def test_what_all_refuse_is_said_once(tmp_path: Path) -> None:
    printed = tune(TWO, tmp_path / "run", "--accumulation", "7", status=2)
    assert printed.count("frozencore: The rows of an optimiser step are shared evenly, but a step has 7 for 2") == 1
    assert "Calibrate" not in printed


@pytest.mark.parametrize(("batch_size", "accumulation", "processes"), [(8, 1, 2), (1, 8, 4), (6, 2, 4), (16, 3, 3)])
def test_the_steps_of_all_are_the_steps_of_one(batch_size: int, accumulation: int, processes: int) -> None:
    recipe = Recipe(learning_rate=1e-3, warmup=0.1, batch_size=batch_size, accumulation=accumulation)
    own = recipe.of_each(processes)
    assert own.batch_size * own.accumulation * processes == batch_size * accumulation
    assert own.batch_size <= batch_size
    for num_rows in (1, 7, 48, 50):
        num_batches = -(-num_rows // (own.batch_size * processes))  # of each process
        assert -(-num_batches // own.accumulation) == recipe.num_steps(num_rows)


def test_rows_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="a step has 8 for 3 processes"):
        Recipe(learning_rate=1e-3, warmup=0.1).of_each(3)


def test_processes_are_several_where_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # a scheduler's, of something else
    assert (num_started(), is_first()) == (1, True)
    refuse_several("This")
    with process_group("cpu"):
        assert not torch.distributed.is_initialized()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", "3")
    assert (num_started(), is_first()) == (4, False)
    with pytest.raises(ConfigError, match="This is done by one process, but 4 were started"):
        refuse_several("This")


@pytest.mark.parametrize(
    ("device", "has_gpu", "on_cpu"),
    [("cpu", True, True), ("auto", True, False), ("cuda", True, False), ("auto", False, True)],
)
def test_processes_exchange_on_the_device_of_the_run(
    device: str, has_gpu: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    started = Mock()
    monkeypatch.setattr("frozencore.tune.process_group.PartialState", started)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with process_group(device):
        assert started.call_args.kwargs["cpu"] is on_cpu


def test_other_verbs_are_for_one_process_and_the_first_of_several_says_so(
    command, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    said = "is done by one process, but 2 were started. Start it without torchrun.\n"
    assert command("evaluate", "--model", "x") == (2, "", f"frozencore: frozencore evaluate {said}")
    monkeypatch.setenv("FROZENCORE_DEBUG", "")  # the flag sets it
    with pytest.raises(ConfigError, match="A run learns rows"):
        command("--debug", "tune", "--model", "pocket")
    monkeypatch.setenv("FROZENCORE_DEBUG", "")
    row = ("tune", "--model", "pocket", "--task", "pocket-math", "--out", "x")
    assert command(*row, "--dry-run") == (2, "", f"frozencore: --dry-run {said}")
    monkeypatch.setenv("RANK", "1")
    assert command("campaign", "status", "x") == (2, "", "")
    assert command(*row, "--dry-run") == (2, "", "")
