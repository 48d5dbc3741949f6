"""Losses and scores in the reporters' own files; a package that is not there is one line."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from adapted import adapted
from frozencore.errors import ConfigError, DivergenceError
from frozencore.tune.config import make_config
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run import execute
from frozencore.tune.training import reporting
from frozencore.tune.training.callbacks import Selection
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport, train
from tiny import draw_rows

ROWS = draw_rows(20, seed=5)
RECIPE = Recipe(learning_rate=1e-2, warmup=0.3, epochs=3, batch_size=5, accumulation=1)
WILD = replace(RECIPE, learning_rate=1e30, warmup=0.0)

SMALL: dict[str, Any] = {
    "model": str(pocket_model_path()), "task": "pocket-sentiment", "rank": 4, "calibration_size": 8, "batch_size": 8,
    "accumulation": 1, "epochs": 2, "num_train": 24, "num_evaluation": 10, "device": "cpu",
    "select_checkpoint": "epoch",
}  # fmt: skip


def written(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_package_that_is_not_installed_is_one_line(
    name: reporting.Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "get_available_reporting_integrations", lambda: ["mlflow"])
    leave_out = f"pip install {name}, or leave it out of --report-to"
    with pytest.raises(ConfigError, match=leave_out), reporting.reporting((name,), tmp_path, {}):
        raise AssertionError("it began")


class Reporter(TrainerCallback):
    """Notes what it is told, and fails at one event."""

    def __init__(self, failing: str | None = None) -> None:
        self.failing, self.told = failing, list[str]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._note("begin")

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self._note("test" if "test_loss" in logs else "log")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._note("end")

    def _note(self, event: str) -> None:
        self.told.append(event)
        if event == self.failing:
            raise OSError("no network")


def reported(folder: Path, recipe: Recipe) -> TrainingReport:
    """A training and a score, told to two reporters."""
    with reporting.reporting(("wandb", "trackio"), folder, {}) as told:
        assert told is not None
        report = train(adapted("random"), ROWS, recipe, pad_id=0, reports=told)
        told.tell({"loss": 1.0})
    return report


@pytest.mark.parametrize(
    ("failing", "heard"),
    [("begin", ["begin", "end"]), ("log", ["begin", "log", "end"]), ("end", ["begin", *["log"] * 13, "test", "end"])],
)
def test_a_reporter_that_fails_is_a_warning_and_stops_no_training_and_no_reporter_and_hides_no_error(
    failing: str, heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fine = Reporter(failing), Reporter()
    monkeypatch.setattr(reporting, "get_available_reporting_integrations", lambda: ["wandb", "trackio"])
    monkeypatch.setattr(reporting, "get_reporting_integration_callbacks", lambda _: [lambda: broken, lambda: fine])
    with pytest.warns(UserWarning, match="A reporter of the run failed: no network"):
        report = reported(tmp_path, RECIPE)
    assert report.num_steps == 12
    assert broken.told == heard
    assert fine.told == ["begin", *["log"] * 13, "test", "end"]  # each step, and the Trainer's summary
    broken.told.clear(), fine.told.clear()
    with pytest.raises(DivergenceError), pytest.warns(UserWarning, match="A reporter of the run failed: no network"):
        reported(tmp_path, WILD)
    assert broken.told[-1] == fine.told[-1] == "end"


def test_tensorboard_has_every_steps_loss_and_rate_and_every_score(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    scores = iter([3.0, 2.0, 2.5])
    chosen = Selection("epoch", lambda _: (next(scores), 0.5), identity="some rows")
    with reporting.reporting(("tensorboard",), tmp_path, {"rank": 3}) as told:
        report = train(adapted("random"), ROWS, RECIPE, pad_id=0, selection=chosen, reports=told)
        told.tell({"loss": 1.5, "loss_before": 4.0})
    found = written(tmp_path / "logs")
    assert list(found["train/loss"].values()) == pytest.approx(report.losses)
    assert found["train/learning_rate"].keys() == set(range(1, 13))
    assert found["eval/loss"] == {4: 3.0, 8: 2.0, 12: 2.5}
    assert found["eval/accuracy"] == {4: 0.5, 8: 0.5, 12: 0.5}
    assert found["test/loss"] == {12: 1.5}
    assert found["test/loss_before"] == {12: 4.0}


def test_the_time_that_a_reporter_takes_to_begin_is_no_time_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    begin = TensorBoardCallback.on_train_begin
    monkeypatch.setattr(
        TensorBoardCallback, "on_train_begin", lambda *event, **named: time.sleep(0.3) or begin(*event, **named)
    )
    with reporting.reporting(("tensorboard",), tmp_path, {}) as told:
        start = time.perf_counter()
        report = train(adapted("random"), ROWS[:5], RECIPE, pad_id=0, reports=told)
        assert report.time_s <= time.perf_counter() - start - 0.3


def test_tensorboard_has_what_came_before_a_training_diverged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(DivergenceError), reporting.reporting(("tensorboard",), tmp_path, {}) as told:
        train(adapted("random"), ROWS, WILD, pad_id=0, reports=told)
    assert 1 in written(tmp_path / "logs")["train/loss"]


@pytest.mark.slow
def test_a_run_is_whole_in_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    command = [sys.executable, "-m", "frozencore", "tune", "--output", str(tmp_path / "mine"), "--report-to", "trackio"]
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([*command, *options], check=True, capture_output=True)  # trackio reads its folder when imported
    record = json.loads((tmp_path / "mine" / "result.json").read_text())
    with closing(sqlite3.connect(tmp_path / "trackio" / "huggingface.db")) as database:
        ((name, told),) = database.execute("SELECT run_name, config FROM configs").fetchall()
        logs = [json.loads(log) for (log,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]
    assert name.startswith("mine-")
    require_whole(record, json.loads(told), logs)


@pytest.fixture(scope="module")
def wandb_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], list[Path]]]:
    """The files of W&B's runs so far, the oldest first; a process has one folder for them."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        yield lambda: sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime_ns)


@pytest.mark.slow
def test_each_run_is_whole_in_wandb_and_is_its_own(tmp_path: Path, wandb_files: Callable[[], list[Path]]) -> None:
    import wandb

    records = [tuned("wandb", tmp_path / name) for name in ("one", "two")]
    assert wandb.run is None
    found = list(map(wandb_run, wandb_files()))
    assert [name.partition("-")[0] for name, *_ in found] == ["one", "two"]
    for record, (_, options, logs, exit_code) in zip(records, found, strict=True):
        require_whole(record, options, logs)
        assert exit_code == 0


@pytest.mark.slow
def test_wandb_is_told_that_a_training_diverged_and_somebody_elses_run_stays_open(
    tmp_path: Path, wandb_files: Callable[[], list[Path]]
) -> None:
    import wandb

    with pytest.raises(DivergenceError), reporting.reporting(("wandb",), tmp_path, {}) as told:
        train(adapted("random"), ROWS, WILD, pad_id=0, reports=told)
    _, _, logs, exit_code = wandb_run(wandb_files()[-1])
    assert "train/loss" in logs[0]
    assert exit_code == 1
    theirs = wandb.init()
    with reporting.reporting(("wandb",), tmp_path, {}) as told:
        train(adapted("random"), ROWS, RECIPE, pad_id=0, reports=told)
    assert wandb.run is theirs
    theirs.finish()


def tuned(reporter: str, out: Path) -> dict[str, Any]:
    """The record of a small run that selects among its steps."""
    config = make_config(**SMALL, report_to=(reporter,))
    return execute(config, out, lambda *_: None).content()


def require_whole(record: dict[str, Any], options: dict[str, Any], logs: list[dict[str, float]]) -> None:
    """The reported values are those of the record."""
    assert options["frozencore"] == record["config"]
    assert [log["train/loss"] for log in logs if "train/loss" in log] == pytest.approx(record["training"]["losses"])
    rates = [log["train/learning_rate"] for log in logs if "train/learning_rate" in log]
    assert max(rates) == pytest.approx(record["resolved"]["recipe"]["learning_rate"])
    scored = [log["eval/loss"] for log in logs if "eval/loss" in log]
    assert scored == pytest.approx([score["held_out_loss"] for score in record["selection"]["scores"]])
    assert logs[-1]["test/loss"] == pytest.approx(record["held_out_loss"])
    assert logs[-1]["test/loss_before"] == pytest.approx(record["held_out_loss_before"])
    assert logs[-1]["test/accuracy"] == pytest.approx(record["accuracy"])
    assert logs[-1]["train/global_step"] == record["training"]["num_steps"]


def wandb_run(file: Path) -> tuple[str, dict[str, Any], list[dict[str, float]], int]:
    """Name, configuration, history and exit code in an offline file of W&B's: protocol buffers in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    name, options, logs, exit_code = "", {}, [], -1
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, part = Record.FromString(part), b""
            name = record.run.display_name or name
            options |= {item.key: json.loads(item.value_json) for item in record.config.update}
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                logs.append({key: json.loads(value) for key, value in items.items()})
            if record.HasField("exit"):
                exit_code = record.exit.exit_code
    return name, options, logs, exit_code
