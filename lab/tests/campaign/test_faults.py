"""Faults around a campaign: whatever is killed, taken, lost, read-only or full, each run is made exactly once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forked import command as run_command
from forked import in_a_process
from frozencore.tune.record import Failure
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.cli.campaign_lines import ready_ids
from small_campaign import FOUR_METHODS, TWO_METHODS, index_of, results_of, write_spec
from small_runs import record_content

Command = Callable[..., tuple[int, str, str]]
Mount = Callable[[str], Path]
ONE_METHOD = TWO_METHODS.replace("[fcca, lora_xs]", "[lora_xs]").replace("epochs: 2", "epochs: 1")


def one_line(errors: str) -> str:
    (line,) = errors.splitlines()
    return line


def test_a_second_driver_is_refused_and_touches_nothing(command: Command, tmp_path: Path) -> None:
    spec, out = write_spec(tmp_path, ONE_METHOD), tmp_path / "out"
    failure = out / "failed" / ("0" * 16) / "failure.json"
    failure.parent.mkdir(parents=True)
    failure.write_text("{}")
    with Store(out).locked("driver", wait=False):
        status, _, errors = command("campaign", "run", spec, "--output", out, "--workers", "0", "--retry-failed")
    assert status == 2
    assert one_line(errors).startswith(f"frozencore: Another process drives the campaign in {out}.")
    assert failure.exists()
    assert not (out / "campaign.json").exists()


def record_of(run_id: str) -> dict[str, Any]:
    """With a key that no version knows, and letters."""
    return record_content({"task": "svamp"}, accuracy=int(run_id, 16) / 2, note="nä")


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut", "garbage", "another line", "a list", "another value"])
def test_the_index_is_rebuilt_from_the_runs(damage: str, tmp_path: Path) -> None:
    ids = [f"{i:016x}" for i in range(3)]
    for run_id in ids:
        with Store(tmp_path).running(run_id) as folder:
            (folder / "result.json").write_text(json.dumps(record_of(run_id)))
    Store(tmp_path).write_index()
    index = tmp_path / "records.jsonl"
    whole = index.read_bytes()
    damaged = {
        "emptied": b"", "cut": whole[:-30], "garbage": b"\xff\x00{" + whole[20:], "another line": b"{}\n" + whole,
        "a list": b"[]\n", "another value": whole.replace(b"0.5", b"0.9"),
    }  # fmt: skip
    if damage == "deleted":
        index.unlink()
    else:
        index.write_bytes(damaged[damage])
    for run_id in ids:
        outcome = Store(tmp_path).outcome(run_id)
        assert outcome.content() == record_of(run_id) | {"run_id": run_id}
    Store(tmp_path).write_index()
    assert index.read_bytes() == whole


DAMAGED = (
    "", "[1]", "{", "[" * 100_000, "\ufeff{}", '{"method": "fcca"}',
    *(
        json.dumps(record_content({"task": "svamp"}, **wrong))
        for wrong in (
            {"accuracy": "high"}, {"held_out_loss": []}, {"hashes": 3}, {"accuracy": float("nan")},
            {"total_s": int("9" * 400)}, {"provenance": [1]},
        )
    ),
)  # fmt: skip


def test_a_damaged_result_is_one_line_and_its_run_is_made_again(command: Command, tmp_path: Path) -> None:
    spec, out = write_spec(tmp_path, ONE_METHOD), tmp_path / "out"
    assert command("campaign", "run", spec, "--output", out, "--workers", "0")[0] == 0
    (result,), whole = out.glob("runs/*/result.json"), results_of(out)
    for content in DAMAGED:
        result.write_text(content)
        readers = [["status", out], ["run", spec, "--output", out, "--workers", "0"], ["report", out]]
        for words in readers if content == DAMAGED[0] else readers[:1]:  # one reader, whoever asks
            status, _, errors = command("campaign", *words)
            assert status == 2
            assert f"{result} is damaged" in one_line(errors)
            assert "Remove its folder" in errors
    shutil.rmtree(result.parent)
    assert command("campaign", "run", spec, "--output", out, "--workers", "0")[0] == 0
    assert results_of(out) == whole


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_stops_the_campaign_and_fails_no_run(
    num_workers: int, command: Command, mount: Mount, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, ONE_METHOD.replace("seed: [42]", "seed: [42, 43]"))
    out = mount("size=1m") / "out"
    words = ("campaign", "run", spec, "--output", out, "--workers", str(num_workers))
    status, _, errors = command(*words)
    assert status == 2
    assert "No space left on device" in one_line(errors)
    assert not list(out.glob("failed/*/failure.json"))
    mount("remount,size=64m")
    status, _, errors = command(*words)
    assert (status, errors) == (0, "")
    assert len(index_of(out)) == 2


FAILING = """
name: failing
models: {pocket: pocket}
base: {dtype: float32, num_train: 32, num_evaluation: 16, epochs: 1, method: lora_xs}
studies:
  diverged: {title: D, axes: &axes {model: [pocket], task: [pocket-sentiment], seed: [42]},
    fixed: {learning_rate: 1e300}, report: {columns: [seed]}}
  bad-input: {title: B, axes: *axes, fixed: {max_length: 4}, report: {columns: [seed]}}
"""


def test_a_failed_run_keeps_its_reason_and_is_retried_on_request(command: Command, tmp_path: Path) -> None:
    spec, out = write_spec(tmp_path, FAILING), tmp_path / "out"
    words = ("campaign", "run", spec, "--output", out, "--workers", "0")
    assert command(*words)[0] == 1
    store = Store(out)
    failures = {run.study: run.job.id for run in plan(read_campaign(spec), store.outcome) if run.job}
    for study, run_id in failures.items():
        outcome = store.outcome(run_id)
        assert isinstance(outcome, Failure)
        assert outcome.reason == study.replace("-", " ")
        assert "Traceback" in (store.failed / run_id / "log.txt").read_text()
    assert ready_ids(spec, out, data_root=None) == []
    status, printed, _ = command("campaign", "status", out)
    assert status == 0
    assert all(run_id in printed for run_id in failures.values())
    files = [store.failed / run_id / "failure.json" for run_id in failures.values()]
    times = [file.stat().st_mtime_ns for file in files]
    assert command(*words, "--retry-failed")[0] == 1
    assert all(file.stat().st_mtime_ns > time for file, time in zip(files, times, strict=True))


def drive_here(words: list[str]) -> None:
    """The command; its workers are forked from it."""
    os.register_at_fork(after_in_child=let_go_of_the_lock)
    run_command(words)


def let_go_of_the_lock() -> None:
    """A worker that is forked has its driver's open files, unlike one that is started anew."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(descriptor).endswith("/locks/driver"):
                os.close(int(descriptor.name))


def forked(spec: Path, folder: Path, num_workers: int = 0) -> Any:
    words = ["campaign", "run", str(spec), "--output", str(folder), "--workers", str(num_workers)]
    return in_a_process(partial(drive_here, words), folder.parent)


def goes_on(folder: Path, num_stages: int, alive: Callable[[], bool]) -> bool:
    """Wait until the workers have told so many more stages, or are just about to; False if all ended before."""
    goal = stages_told(folder) + num_stages
    while stages_told(folder) < goal:
        if not alive():
            return False
        time.sleep(0.005)
    return True


def stages_told(folder: Path) -> int:
    """Lines of all logs: how far a campaign is, however slow the machine; a run that is resumed adds to its log."""
    told = 0
    for log in folder.glob("runs/*/log.txt"):
        with suppress(FileNotFoundError):  # renamed
            told += log.read_text().count("\n")
    return told


@pytest.mark.slow
def test_twenty_kills_of_drivers_and_workers_change_nothing(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, FOUR_METHODS)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    calm = forked(spec, undisturbed)
    moments = random.Random(1)
    killed = {"driver": 0, "worker": 0}
    while sum(killed.values()) < 20:
        driver = forked(spec, disturbed, num_workers=2)
        if moments.random() < 0.7 and goes_on(disturbed, moments.randint(1, 20), driver.is_alive):
            workers = children_of(driver.pid)  # none yet, where those of the last driver still tell
            for worker in moments.sample(workers, min(1, len(workers))):
                os.kill(worker, signal.SIGKILL)
                killed["worker"] += 1
        assert goes_on(disturbed, moments.randint(0, 20), driver.is_alive), "it was over too soon: give it more runs"
        time.sleep(moments.uniform(0, 0.05))
        driver.kill()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
        killed["driver"] += 1
    assert min(killed.values()) >= 5
    driver = forked(spec, disturbed, num_workers=2)
    for process in (calm, driver):
        process.join()
        assert process.exitcode == 0
    assert results_of(disturbed) == results_of(undisturbed)
    assert index_of(disturbed) == sorted(results_of(undisturbed))
    assert stages_told(disturbed) > stages_told(undisturbed)  # some of the work was made again
    assert not list(disturbed.glob("runs/.*"))
    assert not list(disturbed.glob("runs/*/.*"))


def children_of(process: int) -> list[int]:
    """Process ids of a driver's workers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(status.parent.name))
    return found
