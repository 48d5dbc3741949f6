"""Whatever is killed, and whenever: the results are those of an undisturbed campaign, each run exactly once."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from frozencore.lab.campaign.crew import LocalCrew
from frozencore.lab.campaign.drive import MOST_DEATHS, drive
from frozencore.lab.campaign.plan import plan
from frozencore.lab.campaign.shared import needs_of
from frozencore.lab.campaign.spec import read_campaign
from frozencore.lab.campaign.store import Store
from frozencore.lab.campaign.worker import Place
from undisturbed import (
    ENVIRONMENT,
    FOUR_METHODS,
    TWO_METHODS,
    command_line,
    frozencore_run,
    index_of,
    results_of,
    specification,
)

FORK = multiprocessing.get_context("fork")  # a driver without the seconds that a new process needs for its imports


def drive_here(spec: Path, folder: Path) -> None:
    """The command, in a forked process."""
    import torch

    from frozencore import cli

    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        sys.argv = ["frozencore", "campaign", "run", str(spec), "--output", str(folder), "--workers", "0"]
        cli.main()


def forked(spec: Path, folder: Path) -> Any:
    process = FORK.Process(target=drive_here, args=(spec, folder))
    process.start()
    return process


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


def test_three_kills_change_nothing(tmp_path: Path) -> None:
    spec = specification(tmp_path, TWO_METHODS)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    calm = forked(spec, undisturbed)
    moments = random.Random(0)
    for _ in range(3):
        driver = forked(spec, disturbed)
        assert goes_on(disturbed, moments.randint(1, 40), driver.is_alive)
        time.sleep(moments.uniform(0, 0.05))
        driver.kill()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
    driver = forked(spec, disturbed)
    for process in (calm, driver):
        process.join()
        assert process.exitcode == 0
    assert results_of(disturbed) == results_of(undisturbed)
    assert index_of(disturbed) == sorted(results_of(undisturbed))
    assert stages_told(disturbed) > stages_told(undisturbed)  # some of the work was made again


@pytest.mark.slow
def test_twenty_kills_of_drivers_and_workers_change_nothing(tmp_path: Path) -> None:
    spec = specification(tmp_path, FOUR_METHODS)
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert frozencore_run("campaign", "run", spec, "--output", undisturbed, "--workers", "0").returncode == 0
    moments = random.Random(1)
    kills = 0
    words = command_line("campaign", "run", spec, "--output", disturbed, "--workers", "2")
    while kills < 20:
        driver = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if moments.random() < 0.5 and goes_on(disturbed, moments.randint(1, 20), partial(is_alive, driver)):
            for worker in workers_of(driver.pid)[:1]:
                os.kill(worker, signal.SIGKILL)
                kills += 1
        if not goes_on(disturbed, moments.randint(0, 20), partial(is_alive, driver)):
            break
        time.sleep(moments.uniform(0, 0.05))
        driver.kill()
        driver.wait()
        kills += 1
    assert kills >= 20, "the campaign was over too soon: give it more runs"
    last = frozencore_run("campaign", "run", spec, "--output", disturbed, "--workers", "2")
    assert last.returncode == 0, last.stderr
    assert results_of(disturbed) == results_of(undisturbed)
    assert index_of(disturbed) == sorted(results_of(undisturbed))
    assert stages_told(disturbed) > stages_told(undisturbed)  # some of the work was made again
    assert not list(disturbed.glob("runs/.*"))
    assert not list(disturbed.glob("runs/*/.*"))


def is_alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def workers_of(driver: int) -> list[int]:
    """Process ids of a driver's workers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == driver:
                words = (status.parent / "cmdline").read_text()
                if "spawn_main" in words:
                    found.append(int(status.parent.name))
    return found


def test_a_result_that_was_written_before_the_kill_is_kept(tmp_path: Path) -> None:
    """The moment between ``result.json`` and the renaming of its folder."""
    store = Store(tmp_path)
    aside = tmp_path / "runs" / f".{'0' * 16}.partial"
    aside.mkdir(parents=True)
    (aside / "result.json").write_text('{"accuracy": 1.0}')
    (aside / ".result.json.1.tmp").write_text("half of")
    assert store.outcome("0" * 16) is None
    with store.running("0" * 16) as folder:
        assert folder is None
    outcome = store.outcome("0" * 16)
    assert outcome is not None
    assert outcome.record == {"accuracy": 1.0, "run_id": "0" * 16}
    assert [path.name for path in (tmp_path / "runs" / ("0" * 16)).iterdir()] == ["result.json"]


def test_a_run_that_kills_three_workers_has_failed_and_keeps_its_log(tmp_path: Path) -> None:
    """Driven with real worker processes; every one that touches the first run is killed."""
    text = TWO_METHODS.replace("[fcca, lora_xs]", "[lora_xs]").replace("epochs: 3", "epochs: 300")
    campaign = read_campaign(specification(tmp_path, text))
    store = Store(tmp_path / "out")
    crew = LocalCrew(1, store.folder, Place())
    deaths = 0

    def kill(standing: Any, running: Any, event: Any) -> None:
        nonlocal deaths
        deaths += event is not None and event.kind == "died"
        if event is not None and event.kind == "stage" and event.stage == "train":
            process = crew._processes[0]
            assert process is not None
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    standing = drive(campaign, store, crew, kill)
    assert (standing.finished, standing.failed, standing.left) == (0, 1, 0)
    assert deaths == MOST_DEATHS
    (run,) = plan(campaign, store.outcome)
    assert run.job is not None
    outcome = store.outcome(run.job.id)
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.failure["reason"] == "worker died"
    assert "train" in (store.failed / run.job.id / "log.txt").read_text()
    assert not list(store.folder.glob("runs/.*"))


@pytest.mark.slow
def test_a_worker_that_is_killed_while_idle_is_replaced_in_silence(tmp_path: Path) -> None:
    campaign = read_campaign(specification(tmp_path, TWO_METHODS))
    store = Store(tmp_path / "out")
    store.open(campaign)
    jobs = [run.job for run in plan(campaign, store.outcome) if run.job]
    crew = LocalCrew(1, store.folder, Place())
    try:
        for job in (jobs[0], jobs[-1]):
            crew.start(0, job, needs_of(jobs))
            told = list(until_the_end(crew))
            assert [event.kind for event in told if event.kind != "stage"] == ["finished"]
            process = crew._processes[0]
            assert process is not None
            process.kill()
            process.join()
        assert not crew.events(1.0)
    finally:
        crew.close()


def until_the_end(crew: LocalCrew) -> Iterator[Any]:
    while True:
        for event in crew.events(5.0):
            yield event
            if event.kind != "stage":
                return
