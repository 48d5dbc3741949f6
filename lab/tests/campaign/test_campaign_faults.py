"""Faults around a campaign: a folder that is taken, lost, read-only or full; hostile names; runs that fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import forget_cuda
from frozencore.tune.record import Failure, RunRecord
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.cli.campaign_lines import ready_ids
from made_up import record_content
from undisturbed import TWO_METHODS, index_of, results_of, specification

Command = Callable[..., tuple[int, str, str]]
Mount = Callable[[str], Path]
ONE_METHOD = TWO_METHODS.replace("[fcca, lora_xs]", "[lora_xs]").replace("epochs: 2", "epochs: 1")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small file system in memory, with those options."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def make(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("this process may not mount a file system")
        return folder

    yield make
    subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def one_line(errors: str) -> str:
    (line,) = errors.splitlines()
    return line


def test_a_second_driver_is_refused_and_touches_nothing(command: Command, tmp_path: Path) -> None:
    spec, out = specification(tmp_path, ONE_METHOD), tmp_path / "out"
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
            assert folder is not None
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
        assert isinstance(outcome, RunRecord)
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
    spec, out = specification(tmp_path, ONE_METHOD), tmp_path / "out"
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


@pytest.mark.parametrize("name", ["../../x", "a\nb", "x" * 300, "ABCDEF0123456789", "", "."])
def test_a_hostile_run_id_is_refused_and_touches_nothing(name: str, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command("campaign", "plan", specification(tmp_path, ONE_METHOD), "--output", out, "--ids")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    status, _, errors = command("campaign", "one", name, "--output", out)
    assert status == 2
    assert "has no run" in one_line(errors)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["x" * 300, "file/inside"])
def test_a_hostile_output_folder_is_one_line(name: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = specification(tmp_path, ONE_METHOD)
    status, _, errors = command("campaign", "run", spec, "--output", tmp_path / name, "--workers", "0")
    assert status == 2
    assert name[:20] in one_line(errors)


def test_a_folder_that_cannot_be_made_is_one_line(command: Command, tmp_path: Path) -> None:
    spec = specification(tmp_path, ONE_METHOD)
    for out in (spec / "out", Path("/proc/frozencore")):
        status, _, errors = command("campaign", "run", spec, "--output", out, "--workers", "0")
        assert status == 2
        assert str(out) in one_line(errors)


def test_a_read_only_file_system_is_one_line(command: Command, mount: Mount, tmp_path: Path) -> None:
    spec, out = specification(tmp_path, ONE_METHOD), mount("size=1m,ro") / "out"
    status, _, errors = command("campaign", "run", spec, "--output", out, "--workers", "0")
    assert status == 2
    assert str(out) in one_line(errors)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_stops_the_campaign_and_fails_no_run(
    num_workers: int, command: Command, mount: Mount, tmp_path: Path
) -> None:
    spec = specification(tmp_path, ONE_METHOD.replace("seed: [42]", "seed: [42, 43]"))
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


@pytest.mark.parametrize(
    ("name", "line"),
    [("../small", 1), ('"sm\\nall"', 1), ("s" * 300, 1), ("Small", 1), ("..", 1), ("small/", 1), ("'small\n\n'", 1)],
)
def test_a_hostile_name_is_refused_with_its_line(name: str, line: int, command: Command, tmp_path: Path) -> None:
    spec = specification(tmp_path, ONE_METHOD.strip().replace("name: small", f"name: {name}"))
    status, _, errors = command("campaign", "run", spec)
    assert status == 2
    assert f"line {line}: name: string should match pattern" in one_line(errors)


@pytest.mark.parametrize("twin", ["Main", "MAIN", "../main", '"main\\n"'])
def test_a_study_cannot_be_the_twin_of_another(twin: str, command: Command, tmp_path: Path) -> None:
    study = ONE_METHOD.partition("  main:\n")[2]
    spec = specification(tmp_path, f"{ONE_METHOD}  {twin}:\n{study}")
    status, _, errors = command("campaign", "plan", spec)
    assert status == 2
    assert ", line " in one_line(errors)
    assert "pattern" in errors


@pytest.mark.parametrize("twin", ["Pocket", "../pocket", '"pocket\\n"', "p" * 300])
def test_a_model_cannot_be_the_twin_of_another(twin: str, command: Command, tmp_path: Path) -> None:
    twins = ONE_METHOD.replace("{pocket: pocket}", f"{{pocket: pocket, {twin}: pocket}}")
    status, _, errors = command("campaign", "plan", specification(tmp_path, twins))
    assert status == 2
    assert "pattern" in one_line(errors)


FAILING = """
name: failing
models: {pocket: pocket}
base: {dtype: float32, num_train: 32, num_evaluation: 16, epochs: 1, method: lora_xs}
studies:
  diverged: {title: D, axes: &axes {model: [pocket], task: [pocket-sentiment], seed: [42]},
    fixed: {learning_rate: 1e30}, report: {columns: [seed]}}
  bad-input: {title: B, axes: *axes, fixed: {max_length: 4}, report: {columns: [seed]}}
  out-of-memory: {title: O, axes: *axes, fixed: {batch_size: 1800, num_train: 1800}, report: {columns: [seed]}}
"""


def test_a_failed_run_keeps_its_reason_and_is_retried_on_request_only(command: Command, tmp_path: Path) -> None:
    spec, out = specification(tmp_path, FAILING), tmp_path / "out"
    with_little_memory(spec, out, "--workers", "0")
    store = Store(out)
    failures = {run.study: run.job.id for run in plan(read_campaign(spec), store.outcome) if run.job}
    when = {run_id: (store.failed / run_id / "failure.json").stat().st_mtime_ns for run_id in failures.values()}
    for study, run_id in failures.items():
        outcome = store.outcome(run_id)
        assert isinstance(outcome, Failure)
        assert outcome.reason == study.replace("-", " ")
        assert "Traceback" in (store.failed / run_id / "log.txt").read_text()
    assert ready_ids(spec, out, data_root=None) == []
    status, printed, _ = command("campaign", "status", out)
    assert status == 0
    assert all(run_id in printed for run_id in failures.values())
    for words, again in ((), False), (("--retry-failed",), True):
        with_little_memory(spec, out, "--workers", "0", *words)
        for run_id, then in when.items():
            assert ((store.failed / run_id / "failure.json").stat().st_mtime_ns > then) == again


def with_little_memory(spec: Path, out: Path, *words: str) -> None:
    """The command in a forked process with 200 MB more than it begins with; it must end with status 1."""

    def run() -> None:
        from frozencore.cli import app as cli

        forget_cuda()
        used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (used + 200_000_000,) * 2)
        sys.argv = ["frozencore", "campaign", "run", str(spec), "--output", str(out), *words]
        cli.main()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 1


@pytest.mark.slow
def test_two_arrays_of_single_runs_make_the_campaign(command: Command, tmp_path: Path) -> None:
    """Run a campaign as lab/README.md does it with Slurm."""
    spec = specification(tmp_path, ONE_METHOD.replace("for: [fcca]", "for: [lora_xs]"))
    one_by_one, driven = tmp_path / "one-by-one", tmp_path / "driven"
    counts = []
    for _ in ("search", "final", "nothing"):
        status, ids, _ = command("campaign", "plan", spec, "--output", one_by_one, "--ids")
        assert status == 0
        counts.append(len(ids.split()))
        for run_id in ids.split():
            assert command("campaign", "one", run_id, "--output", one_by_one)[0] == 0
    assert counts == [2, 1, 0]
    assert command("campaign", "run", spec, "--output", driven, "--workers", "0")[0] == 0
    assert results_of(one_by_one) == results_of(driven)
