"""Processes of this machine: idle ones that are lost, busy ones that are told to stop, and one without a driver."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import pytest

from forked import FORK
from frozencore_lab.campaign import worker_pool as crew_module
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.kinds import KINDS
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place, Worker
from frozencore_lab.campaign.worker_pool import Event, LocalPool

JOB = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42})
LONG_S = 60.0


def finishes_at_once(connection: Connection, *_: object) -> None:
    """A worker's process whose runs take no time."""
    connection.recv()
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        connection.send(Event(0, "finished"))


def trains_until_it_is_told(connection: Connection, driver: int, number: int, num_threads: int) -> None:
    """A worker's process that writes a checkpoint when it is told to stop, a little later."""
    folder = connection.recv().store.folder

    def stop(number: int, frame: FrameType | None) -> None:
        time.sleep(0.1)
        (folder / f"checkpoint-{os.getpid()}").write_text("whole")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    connection.recv()
    connection.send(Event(number, "stage", "train", 1, 2))
    time.sleep(LONG_S)


@pytest.fixture
def make_crew(monkeypatch: pytest.MonkeyPatch) -> type[LocalPool]:
    """Crews of forked processes, without the seconds that new ones need for their imports."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: FORK)
    return LocalPool


def events_of(pool: LocalPool) -> list[Event]:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        if told := list(pool.events(0.1)):
            return told
    raise TimeoutError


def test_a_worker_that_is_killed_while_idle_is_no_death_and_is_replaced_at_its_next_run(
    make_crew: type[LocalPool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(crew_module, "_work", finishes_at_once)
    monkeypatch.setattr(crew_module, "GOOD_BYE_S", 0.1)  # a forked one holds our end of its connection, too
    pool = make_crew(1, Worker(Store(tmp_path), Place()))
    pool.start(0, JOB, {})
    assert events_of(pool) == [Event(0, "finished")]
    first = pool._processes[0]
    first.kill()
    first.join(LONG_S)
    assert pool.events(LONG_S) == []
    pool.start(0, JOB, {})
    assert events_of(pool) == [Event(0, "finished")]
    assert pool._processes[0].pid != first.pid
    pool.close()


def test_closing_lets_busy_workers_write_their_checkpoints_all_at_the_same_time(
    make_crew: type[LocalPool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(crew_module, "_work", trains_until_it_is_told)
    pool = make_crew(2, Worker(Store(tmp_path), Place()))
    pool.start(0, JOB, {})
    pool.start(1, JOB, {})
    told: list[Event] = []
    while len(told) < 2:
        told += events_of(pool)
    processes = [pool._processes[worker] for worker in (0, 1)]
    pool.close()
    assert [process.exitcode for process in processes] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{process.pid}" for process in processes}


def test_a_worker_ends_itself_when_its_driver_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, init = 4711, 1
    parents = [driver, driver, init]
    ended: list[int] = []
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    crew_module._end_with(driver)
    assert ended == [1]
    assert parents == []


def test_what_is_profiled_has_a_process_of_its_own(
    make_crew: type[LocalPool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(crew_module, "_work", finishes_at_once)
    monkeypatch.setattr(crew_module, "GOOD_BYE_S", 0.1)
    pool = make_crew(1, Worker(Store(tmp_path), Place()))
    made_in = []
    for kind in ("tune", "tune", "profile", "profile", "tune"):
        pool.start(0, replace(JOB, kind=KINDS[kind]), {})
        assert events_of(pool) == [Event(0, "finished")]
        made_in.append(pool._processes[0].pid)
    pool.close()
    shared, again, first, second, _ = made_in
    assert shared == again
    assert len({again, first, second}) == 3
