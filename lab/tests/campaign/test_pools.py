"""Workers in processes of this machine, and on Ray: a stand-in whose actors are threads, and a real cluster of two
nodes, one of which is killed in the middle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from forked import SERVER
from frozencore.errors import ConfigError
from frozencore_lab.campaign import ray_pool, worker_pool
from frozencore_lab.campaign.driver import drive
from frozencore_lab.campaign.job import KINDS, Place, make_job
from frozencore_lab.campaign.ray_pool import RayPool
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import Event, LocalPool, OwnProcess, WorkerPool
from small_campaign import ENVIRONMENT, TWO_METHODS, index_of, results_of, write_spec

JOB = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42})
LONG_S = 60.0
Progress = Callable[..., None]


def events_until(pool: WorkerPool, kind: str) -> list[Event]:
    """All events up to the first of that kind."""
    told: list[Event] = []
    until = time.monotonic() + LONG_S
    while not told or told[-1].kind != kind:
        assert time.monotonic() < until, f"nothing is {kind}: {told}"
        told += pool.events(0.1)
    return told


# ------------------------------------------------------------------------------------------- processes of this machine


def finishes_at_once(connection: Connection, *_: object) -> None:
    """A worker's process whose runs take no time."""
    connection.recv()
    with suppress(EOFError):
        while True:
            connection.recv()
            connection.send(Event(0, "finished"))


def trains_until_it_is_told(connection: Connection, driver: int, number: int, num_threads: int) -> None:
    """A worker's process that writes a checkpoint a little later than it is told to stop."""
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
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LocalPool]:
    """Makes a pool of processes of the fork server, without the seconds that new ones need for their imports."""

    def make(size: int, work: Callable[..., None]) -> LocalPool:
        monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: SERVER)
        monkeypatch.setattr(worker_pool, "_work", work)
        return LocalPool(size, Worker(Store(tmp_path), Place()))

    return make


def test_a_worker_that_is_killed_while_idle_is_no_death_and_is_replaced(processes: Callable[..., LocalPool]) -> None:
    pool = processes(1, finishes_at_once)
    pool.start(0, JOB, {})
    assert events_until(pool, "finished") == [Event(0, "finished")]
    first = pool._processes[0]
    first.kill()
    first.join(LONG_S)
    assert pool.events(LONG_S) == []
    pool.start(0, JOB, {})
    assert events_until(pool, "finished") == [Event(0, "finished")]
    assert pool._processes[0].pid != first.pid
    pool.close()


def test_closing_lets_busy_workers_write_their_checkpoints_all_at_the_same_time(
    processes: Callable[..., LocalPool], tmp_path: Path
) -> None:
    pool = processes(2, trains_until_it_is_told)
    for worker in (0, 1):
        pool.start(worker, JOB, {})
    told: list[Event] = []
    while len(told) < 2:
        told += events_until(pool, "stage")
    both = [pool._processes[worker] for worker in (0, 1)]
    pool.close()
    assert [process.exitcode for process in both] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{process.pid}" for process in both}


def test_a_worker_ends_itself_when_its_driver_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, init = 4711, 1
    parents, ended = [driver, driver, init], list[int]()
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    worker_pool._end_with(driver)
    assert (ended, parents) == ([1], [])


def test_what_is_profiled_has_a_process_of_its_own(processes: Callable[..., LocalPool]) -> None:
    pool, made_in = processes(1, finishes_at_once), []
    for kind in ("tune", "tune", "profile", "profile", "tune"):
        pool.start(0, replace(JOB, kind=KINDS[kind]), {})
        events_until(pool, "finished")
        made_in.append(pool._processes[0].pid)
    pool.close()
    shared, again, first, second, _ = made_in
    assert shared == again
    assert len({again, first, second}) == 3


# ------------------------------------------------------------------------------------------ Ray, with actors in threads


class RayError(Exception):
    """The root of Ray's errors."""


class RayTaskError(RayError):
    """An error raised by a method of an actor."""


class Actor:
    """An object whose methods run in threads, each call at once, as with ``max_concurrency``."""

    def __init__(self, made: Any, options: dict[str, Any]) -> None:
        self.made, self.options, self.is_killed = made, options, False
        self._answers: list[Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: self._call(getattr(self.made, name), words))

    def lose(self, message: str = "the actor's node is gone") -> None:
        """The unfinished answers never come."""
        for answer in self._answers:
            with suppress(InvalidStateError):
                answer.set_exception(RayError(message))

    def _call(self, method: Callable[..., Any], words: tuple[Any, ...]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._answers.append(answer)

        def run() -> None:
            try:
                result = method(*words)
            except Exception as error:
                with suppress(InvalidStateError):
                    answer.set_exception(RayTaskError(str(error)))
            else:
                with suppress(InvalidStateError):
                    answer.set_result(result)

        threading.Thread(target=run, daemon=True).start()
        return answer


class Cluster(ModuleType):
    """Stands for the module ``ray``, connected to a cluster with these resources; it behaves as Ray in these calls."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, **resources: float) -> None:
        super().__init__("ray")
        self.resources = resources
        self.hired: list[Actor] = []

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return dict(self.resources)

    def remote(self, kind: Callable[..., Any]) -> Any:
        def hired(*words: Any, **chosen: Any) -> Actor:
            self.hired.append(Actor(kind(*words), chosen))
            return self.hired[-1]

        return SimpleNamespace(options=lambda **chosen: SimpleNamespace(remote=lambda *words: hired(*words, **chosen)))

    def wait(self, answers: Sequence[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        wait_for(answers, timeout, return_when=FIRST_COMPLETED)
        ready = [answer for answer in answers if answer.done()][:1]
        return ready, [answer for answer in answers if answer not in ready]

    def get(self, answer: Future[Any]) -> Any:
        return answer.result()

    def kill(self, actor: Actor) -> None:
        if actor.is_killed:
            raise RayError("it was killed before")
        actor.is_killed = True
        actor.lose()


class Run:
    """A run that goes on until a test lets it; it tells one stage before."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self, tell: Progress) -> bool:
        tell("train", 3, 10, "a note that stays on its node")
        assert self.may_end.wait(LONG_S)
        return True


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., RayPool]]:
    """Makes a pool on a cluster whose workers do the given work instead of training."""
    pools: list[RayPool] = []

    def make(cluster: Cluster, work: Callable[[Progress], bool], num_workers: int | None = None, **at: Any) -> RayPool:
        class Works(Worker):
            def run(self, job: object, needs: object, tell: Progress) -> bool:
                return work(tell)

        (tmp_path / "campaign.json").write_text("{}")
        monkeypatch.setitem(sys.modules, "ray", cluster)
        monkeypatch.setattr(ray_pool, "TELL_EVERY_S", 0.0)
        pools.append(RayPool("auto", num_workers, Works(Store(tmp_path), Place(**at))))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_run_tells_its_stage_and_its_end_and_after_a_death_the_next_run_gets_a_new_actor(
    pool_of: Callable[..., RayPool],
) -> None:
    run, cluster = Run(), Cluster(CPU=1.0)
    pool = pool_of(cluster, run)
    pool.start(0, JOB, {})
    assert events_until(pool, "stage") == [Event(0, "stage", "train", 3, 10)]
    cluster.hired[0].lose("node 7 is gone")
    (death,) = events_until(pool, "died")
    assert (death.worker, death.message.endswith("node 7 is gone\n")) == (0, True)
    assert not pool.events(0.05)  # a death is told once
    run.may_end.set()
    for _ in range(2):  # both by the second actor
        pool.start(0, JOB, {})
        assert events_until(pool, "finished")[-1] == Event(0, "finished")
    assert len(cluster.hired) == 2


def test_a_node_that_does_not_see_the_folder_halts_the_campaign(
    pool_of: Callable[..., RayPool], tmp_path: Path
) -> None:
    pool = pool_of(Cluster(CPU=1.0), Run())
    (tmp_path / "campaign.json").unlink()
    pool.start(0, JOB, {})
    assert f"does not see the campaign's folder {tmp_path}" in events_until(pool, "halted")[-1].message


def test_a_mistake_in_an_actor_is_raised_and_not_taken_for_a_death(pool_of: Callable[..., RayPool]) -> None:
    def mistaken(_: object) -> bool:
        raise TypeError("a mistake of ours")

    pool = pool_of(Cluster(CPU=1.0), mistaken)
    pool.start(0, JOB, {})
    with pytest.raises(RayTaskError, match="a mistake of ours"):
        events_until(pool, "died")


def test_after_a_node_is_gone_a_worker_that_ends_its_run_makes_room(pool_of: Callable[..., RayPool]) -> None:
    """Otherwise the run of a new actor would wait for a CPU that an idle one holds."""
    run, cluster = Run(), Cluster(CPU=2.0)
    pool = pool_of(cluster, run)
    assert pool.size == 2
    for worker in (0, 1):
        pool.start(worker, JOB, {})
    cluster.resources["CPU"] = 1.0
    assert pool.size == 1
    run.may_end.set()
    told = [*events_until(pool, "finished"), *events_until(pool, "finished")]
    assert sum(actor.is_killed for actor in cluster.hired) == 1
    assert {event.worker for event in told if event.kind == "finished"} == {0, 1}
    assert not any(event.kind == "died" for event in told)


@pytest.mark.parametrize(
    ("resources", "options", "size", "room"),
    [
        ({"GPU": 2.0, "CPU": 8.0}, {}, 2, {"num_gpus": 1}),
        ({"GPU": 2.0, "CPU": 8.0}, {"device": "cpu"}, 8, {"num_cpus": 1}),
        ({"GPU": 4.0, "CPU": 8.0}, {"device": "cuda", "num_workers": 3}, 3, {"num_gpus": 1}),
        ({"CPU": 2.0}, {"num_workers": 5}, 2, {"num_cpus": 1}),
    ],
)
def test_a_worker_has_a_gpu_where_the_cluster_offers_some_and_else_a_cpu(
    resources: dict[str, float], options: dict[str, Any], size: int, room: dict[str, int],
    pool_of: Callable[..., RayPool],
) -> None:  # fmt: skip
    cluster = Cluster(**resources)
    pool = pool_of(cluster, lambda _: True, **options)
    assert pool.size == size
    pool.start(0, JOB, {})
    assert {name: value for name, value in cluster.hired[0].options.items() if name.startswith("num_")} == room


def test_a_cluster_without_cpus_and_gpus_is_refused(pool_of: Callable[..., RayPool]) -> None:
    with pytest.raises(ConfigError, match="cluster at auto offers neither CPUs nor GPUs"):
        pool_of(Cluster(memory=1e9), Run())


# ----------------------------------------------------------------------------------------------------- a real cluster

NOTICE_SOON = {  # that a node is gone; by default it takes Ray a quarter of a minute
    "health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}  # fmt: skip
A_LOADED_MACHINE_S = 180


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each; this process is on the first."""
    ray, cluster_utils = pytest.importorskip("ray"), pytest.importorskip("ray.cluster_utils")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": NOTICE_SOON}
    nodes = cluster_utils.Cluster(initialize_head=True, connect=True, head_node_args=head)
    nodes.add_node(num_cpus=1, wait=False)
    nodes.wait_for_nodes(A_LOADED_MACHINE_S)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    campaign = read_campaign(write_spec(tmp_path, TWO_METHODS))
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    torch.set_num_threads(1)
    drive(campaign, here, OwnProcess(Worker(here, Place(), keep_adapters=True)), lambda *_: None)
    pool = RayPool(cluster.address, None, Worker(there, Place(), keep_adapters=True))
    assert pool.size == 2
    told, sizes = list[Event](), list[int]()

    def watch(standing: Any, running: Any, event: Event | None) -> None:
        told.extend([event] if event else [])
        if not sizes and {each.worker for each in told} == {0, 1}:  # both are in the middle of a run
            (doomed,) = cluster.worker_nodes
            cluster.remove_node(doomed, allow_graceful=False)
            cluster.wait_for_nodes(A_LOADED_MACHINE_S)
            sizes.append(pool.size)
            cluster.add_node(num_cpus=1, wait=False)
            cluster.wait_for_nodes(A_LOADED_MACHINE_S)
            sizes.append(pool.size)

    standing = drive(campaign, there, pool, watch)
    assert (standing.finished, standing.failed, standing.left) == (4, 0, 0)
    assert sizes == [1, 2]
    (death,) = [event for event in told if event.kind == "died"]
    assert death.message.startswith("Ray lost the worker's process or its node: ")
    assert sum(event.kind == "finished" for event in told) == 4
    assert {each.stage for each in told if each.kind == "stage"} & {"train", "score", "load"}
    assert results_of(there.folder) == results_of(here.folder)
    assert index_of(there.folder) == sorted(results_of(here.folder))
