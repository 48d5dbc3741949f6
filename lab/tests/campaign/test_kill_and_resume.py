"""Whatever is killed, and whenever: the results are those of an undisturbed campaign, each run exactly once."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forked import forget_cuda
from frozencore.tune.record import Failure, RunRecord
from frozencore_lab.campaign.driver import MOST_DEATHS, drive
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.shared_moments import needs_of
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place, Worker
from frozencore_lab.campaign.worker_pool import LocalPool
from made_up import record_content
from undisturbed import FOUR_METHODS, TWO_METHODS, index_of, results_of, specification

FORK = multiprocessing.get_context("fork")  # without the seconds that a new process needs for its imports


def drive_here(spec: Path, folder: Path, num_workers: int) -> None:
    """The command, in a forked process; its workers are forked from it."""
    import torch

    from frozencore.cli import app as cli

    forget_cuda()
    torch.set_num_threads(1)
    multiprocessing.get_context = lambda method=None: FORK
    os.register_at_fork(after_in_child=let_go_of_the_lock)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        words = ["campaign", "run", str(spec), "--output", str(folder), "--workers", str(num_workers)]
        sys.argv = ["frozencore", *words]
        cli.main()


def let_go_of_the_lock() -> None:
    """A worker that is forked has its driver's open files, unlike one that is started anew."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(descriptor).endswith("/locks/driver"):
                os.close(int(descriptor.name))


def forked(spec: Path, folder: Path, num_workers: int = 0) -> Any:
    process = FORK.Process(target=drive_here, args=(spec, folder, num_workers))
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a campaign of two methods in which nothing was killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    driver = forked(specification(folder, TWO_METHODS), folder / "out")
    driver.join()
    assert driver.exitcode == 0
    return folder / "out"


@pytest.mark.slow
def test_three_kills_change_nothing(undisturbed: Path, tmp_path: Path) -> None:
    spec = specification(tmp_path, TWO_METHODS)
    disturbed = tmp_path / "disturbed"
    moments = random.Random(0)
    for _ in range(3):
        driver = forked(spec, disturbed)
        assert goes_on(disturbed, moments.randint(1, 12), driver.is_alive)
        time.sleep(moments.uniform(0, 0.05))
        driver.kill()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
    driver = forked(spec, disturbed)
    driver.join()
    assert driver.exitcode == 0
    assert results_of(disturbed) == results_of(undisturbed)
    assert index_of(disturbed) == sorted(results_of(undisturbed))
    assert stages_told(disturbed) > stages_told(undisturbed)  # some of the work was made again


@pytest.mark.slow
def test_twenty_kills_of_drivers_and_workers_change_nothing(tmp_path: Path) -> None:
    spec = specification(tmp_path, FOUR_METHODS)
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


def test_of_two_drivers_at_once_one_makes_every_run_and_the_other_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    spec = specification(tmp_path, TWO_METHODS)
    together = tmp_path / "together"
    drivers = [forked(spec, together) for _ in range(2)]
    for driver in drivers:
        driver.join()
    assert sorted(driver.exitcode for driver in drivers) == [0, 2]
    assert results_of(together) == results_of(undisturbed)
    assert index_of(together) == sorted(results_of(undisturbed))
    assert stages_told(together) == stages_told(undisturbed)  # nothing was made twice


def children_of(process: int) -> list[int]:
    """Process ids of a driver's workers."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(status.parent.name))
    return found


def test_a_result_that_was_written_before_the_kill_is_kept(tmp_path: Path) -> None:
    """The moment between ``result.json`` and the renaming of its folder."""
    store = Store(tmp_path)
    aside = tmp_path / "runs" / f".{'0' * 16}.partial"
    aside.mkdir(parents=True)
    record = record_content({"task": "svamp"})
    (aside / "result.json").write_text(json.dumps(record))
    (aside / ".result.json.1.tmp").write_text("half of")
    assert store.outcome("0" * 16) is None
    with store.running("0" * 16) as folder:
        assert folder is None
    outcome = store.outcome("0" * 16)
    assert isinstance(outcome, RunRecord)
    assert outcome.content() == record | {"run_id": "0" * 16}
    assert [path.name for path in (tmp_path / "runs" / ("0" * 16)).iterdir()] == ["result.json"]


def test_a_run_that_kills_three_workers_has_failed_and_keeps_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Driven with worker processes; every one that touches the first run is killed."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: FORK)
    text = TWO_METHODS.replace("[fcca, lora_xs]", "[lora_xs]").replace("epochs: 2", "epochs: 300")
    campaign = read_campaign(specification(tmp_path, text))
    store = Store(tmp_path / "out")
    pool = LocalPool(1, Worker(store, Place()))
    deaths = 0

    def kill(standing: Any, running: Any, event: Any) -> None:
        nonlocal deaths
        deaths += event is not None and event.kind == "died"
        if event is not None and event.kind == "stage" and event.stage == "train":
            process = pool._processes[0]
            assert process is not None
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    standing = drive(campaign, store, pool, kill)
    assert (standing.finished, standing.failed, standing.left) == (0, 1, 0)
    assert deaths == MOST_DEATHS
    (run,) = plan(campaign, store.outcome)
    assert run.job is not None
    outcome = store.outcome(run.job.id)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "worker died"
    assert "train" in (store.failed / run.job.id / "log.txt").read_text()
    assert not list(store.folder.glob("runs/.*"))


@pytest.mark.slow
def test_a_worker_that_is_killed_while_idle_is_replaced_in_silence(tmp_path: Path) -> None:
    campaign = read_campaign(specification(tmp_path, TWO_METHODS))
    store = Store(tmp_path / "out")
    store.open(campaign)
    jobs = [run.job for run in plan(campaign, store.outcome) if run.job]
    pool = LocalPool(1, Worker(store, Place()))
    try:
        for job in (jobs[0], jobs[-1]):
            pool.start(0, job, needs_of(jobs))
            told = list(until_the_end(pool))
            assert [event.kind for event in told if event.kind != "stage"] == ["finished"]
            process = pool._processes[0]
            assert process is not None
            process.kill()
            process.join()
        assert not pool.events(1.0)
    finally:
        pool.close()


def until_the_end(pool: LocalPool) -> Iterator[Any]:
    while True:
        for event in pool.events(5.0):
            yield event
            if event.kind != "stage":
                return
