"""SIGTERM, with which schedulers end a job, and Ctrl-C: a checkpoint after the running step, one line, and bit-equal
from there."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import frozencore.tune.figures  # noqa: F401 - so that no forked command spends a second on importing matplotlib
from forked import start
from frozencore.errors import TrainingError
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.training import callbacks
from frozencore.tune.training.checkpoints import checkpoints, is_whole
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from tiny import draw_rows, tiny_qwen2

ROWS = draw_rows(20, seed=5)
RECIPE = Recipe(learning_rate=1e-2, epochs=2, batch_size=2, accumulation=3, warmup=0.3)  # four steps an epoch
TERMINATED, INTERRUPTED = 143, 130
Heard = list[int]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """The signals that a handler of the user's own is called with."""
    calls: Heard = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, _: calls.append(number))
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def told_at(step: int | None, number: int = signal.SIGTERM) -> Callable[[str, int, int, str], None]:
    """Sends the signal when the training first reports that step."""
    steps = [step]

    def tell(_: str, done: int, *__: object) -> None:
        if done == steps[0]:
            steps.clear()
            steps.append(None)
            os.kill(os.getpid(), number)

    return tell


def run(
    folder: Path, model: torch.nn.Module, *, every: int | None, at: int | None = None, number: int = signal.SIGTERM
) -> TrainingReport:
    return train(
        model, ROWS, RECIPE, pad_id=0, checkpoint_dir=folder, checkpoint_steps=every, resume=True,
        progress=told_at(at, number),
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, TrainingReport]:
    model = tiny_qwen2()
    return model, run(tmp_path_factory.mktemp("whole"), model, every=None)


@pytest.mark.parametrize(
    ("step", "every", "number"),
    [
        (1, 100, signal.SIGTERM),
        (3, 2, signal.SIGTERM),  # whose checkpoint is due
        (2, 100, signal.SIGHUP),  # of a terminal that was closed
        (4, None, signal.SIGINT),  # the first of the second epoch
    ],
)
def test_a_training_that_is_told_to_stop_goes_on_bit_equal(
    step: int,
    every: int | None,
    number: int,
    tmp_path: Path,
    heard: Heard,
    uninterrupted: tuple[torch.nn.Module, TrainingReport],
) -> None:
    handler = signal.getsignal(number)
    model, (whole, expected) = tiny_qwen2(), uninterrupted
    with pytest.raises(TrainingError, match=rf"told to stop at step {step + 1} of 8\. Its checkpoint is whole"):
        run(tmp_path / "cut", model, every=every, at=step, number=number)
    assert heard == [number]
    assert signal.getsignal(number) is handler
    assert is_whole(tmp_path / "cut" / f"checkpoint-{step + 1}")
    resumed = tiny_qwen2()
    report = run(tmp_path / "cut", resumed, every=every)
    assert report.resumed_from == tmp_path / "cut" / f"checkpoint-{step + 1}"
    assert report.training.losses == expected.training.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_ctrl_c_itself_says_which_step_is_saved_and_a_second_one_does_not_wait(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt) as once:
        run(tmp_path / "once", tiny_qwen2(), every=None, at=2, number=signal.SIGINT)
    assert once.value.__notes__ == ["step 3 of 8 is saved"]
    assert [folder.name for folder in checkpoints(tmp_path / "once")] == ["checkpoint-3"]

    said: list[str] = []

    def twice(_: str, done: int, __: int | None, note: str = "") -> None:
        said.append(note)
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):  # the first is told to the reporter, which sends the second
        train(tiny_qwen2(), ROWS, RECIPE, pad_id=0, checkpoint_dir=tmp_path / "twice", progress=twice)
    assert said[-1] == "stops after this step; Ctrl-C again ends it at once"
    assert not checkpoints(tmp_path / "twice")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_on_a_full_disk_says_that_the_step_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "mark_whole", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(KeyboardInterrupt) as end:
        run(tmp_path, tiny_qwen2(), every=None, at=2, number=signal.SIGINT)
    (note,) = end.value.__notes__
    assert re.search("could not be written to .*No space left on device", note)


def test_a_training_that_ends_with_the_step_is_done_before_the_signal_is_heard(tmp_path: Path, heard: Heard) -> None:
    assert run(tmp_path, tiny_qwen2(), every=2, at=8).training.num_steps == 8
    assert len(heard) == 1


def test_without_checkpoints_and_in_a_thread_the_signal_comes_at_once(tmp_path: Path, heard: Heard) -> None:
    def note(_: str, done: int, *__: object) -> None:
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        elif done == 4:
            assert len(heard) == 1

    assert train(tiny_qwen2(), ROWS, RECIPE, pad_id=0, progress=note).training.num_steps == 8
    in_a_thread: list[int] = []
    thread = threading.Thread(
        target=lambda: in_a_thread.append(run(tmp_path, tiny_qwen2(), every=100).training.num_steps), daemon=True
    )
    thread.start()
    thread.join()
    assert in_a_thread == [8]


def tune(out: Path, *words: str) -> list[str]:
    return [
        "tune", "--model", str(pocket_model_path()), "--task", "pocket-sentiment", "--output", str(out), "--rank", "4",
        "--batch-size", "8", "--accumulation", "1", "--num-train", "32", "--num-evaluation", "8", "--epochs", "4",
        "--dtype", "float32", "--select-checkpoint", "epoch", "--calibration-size", "8", *words,
    ]  # fmt: skip


def finished(words: list[str], said: Path) -> None:
    process = start(words, said)
    process.join()
    assert process.exitcode == 0, (said / "err").read_text()


def terminated(words: list[str], said: Path, begun: Callable[[], bool], number: int = signal.SIGTERM) -> str:
    """Tell a command to end once it has begun: it says so in one line."""
    process = start(words, said)
    while not begun():
        assert process.is_alive(), (said / "err").read_text()
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join(60)
    status, how = (TERMINATED, "terminated") if number == signal.SIGTERM else (INTERRUPTED, "interrupted")
    assert process.exitcode == status, (said / "err").read_text()
    (line,) = (said / "err").read_text().splitlines()
    assert line.startswith(f"frozencore: {how}; ")
    return line


def newest(folder: Path) -> Path:
    return max(checkpoints(folder), key=lambda path: int(path.name.split("-")[1]))


def test_a_run_that_is_interrupted_goes_on_to_the_same_end_from_what_it_has_found(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    checkpoint = cut / "checkpoints" / "checkpoint-3" / "complete.json"
    line = terminated(tune(cut, "--save-steps", "3"), tmp_path, checkpoint.exists, signal.SIGINT)
    last = newest(cut / "checkpoints")
    assert is_whole(last)
    step = last.name.split("-")[1]
    way_on = "the same command with --resume continues from what is saved"
    assert line == f"frozencore: interrupted; step {step} of 16 is saved; {way_on}"
    assert not (cut / "result.json").exists()
    process = start(tune(cut), tmp_path)
    process.join()
    assert process.exitcode == 2
    assert (tmp_path / "err").read_text().startswith(f"frozencore: {cut} holds an interrupted run, which has kept its ")
    assert (tmp_path / "out").read_text() == ""
    finished(["tune", "--resume", "--out", str(cut)], tmp_path)
    said = (tmp_path / "out").read_text()
    assert "".join(said.split()).startswith(f"Goesonfromitsstep{step}in{cut}Start")  # a long path is cut into lines
    assert not re.search("Score the base model|Calibrate:|Build the bases", said)
    finished(tune(whole), tmp_path)
    assert re.search("Score the base model.*Calibrate.*Build the bases", (tmp_path / "out").read_text(), re.DOTALL)
    one, other = (json.loads((folder / "result.json").read_text()) for folder in (whole, cut))
    parts = ("training", "accuracy", "accuracy_before", "held_out_loss_before", "hashes", "alignment", "warnings")
    assert {name: one[name] for name in parts} == {name: other[name] for name in parts}
    assert other["calibration"]["median_spread"] == one["calibration"]["median_spread"]
    assert other["selection"] | {"time_s": 0} == one["selection"] | {"time_s": 0}
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "predictions.jsonl"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes()
    assert {path.name for path in cut.iterdir()} == {
        "adapter", "predictions.jsonl", "result.json", "run.yaml", "training.png",
    }  # fmt: skip


def test_a_run_that_is_terminated_before_it_trains_ends_at_once(tmp_path: Path) -> None:
    said = tmp_path / "out"
    line = terminated(tune(tmp_path / "run"), tmp_path, lambda: said.is_file() and said.stat().st_size > 0)
    assert line == "frozencore: terminated; nothing is saved yet; the same command starts from the beginning"
    assert not (tmp_path / "run" / "checkpoints").exists()
