"""A driver with actors that report, end, fail, die and are taken away; no Ray cluster is started."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from frozencore.errors import ConfigError
from frozencore_lab.campaign import ray_pool
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.ray_pool import RayPool
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place, Worker
from frozencore_lab.campaign.worker_pool import Event
from ray_in_threads import Cluster, RayTaskError

JOB = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42})
LONG_S = 60.0
Work = Callable[[Callable[..., None]], bool]


class Run:
    """A run that goes on until a test lets it; it tells one stage before."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_begun = 0

    def __call__(self, tell: Callable[..., None]) -> bool:
        self.num_begun += 1
        tell("train", 3, 10, "a note that stays on its node")
        assert self.may_end.wait(LONG_S)
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "campaign.json").write_text("{}")
    return tmp_path


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[..., RayPool]]:
    """Makes a pool on a cluster whose workers do the given work instead of training."""
    pools: list[RayPool] = []

    def make(cluster: Cluster, work: Work = lambda _: True, **options: Any) -> RayPool:
        class Works(Worker):
            def run(self, job: object, needs: object, tell: Callable[..., None]) -> bool:
                return work(tell)

        monkeypatch.setitem(sys.modules, "ray", cluster)
        monkeypatch.setattr(ray_pool, "TELL_EVERY_S", 0.0)
        worker = Works(Store(folder), Place(device=options.pop("device", "auto")))
        pools.append(RayPool(options.pop("address", "auto"), options.pop("num_workers", None), worker))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def events_until(pool: RayPool, kind: str) -> list[Event]:
    """All events up to the first of that kind."""
    told: list[Event] = []
    until = time.monotonic() + LONG_S
    while not told or told[-1].kind != kind:
        assert time.monotonic() < until, f"nothing is {kind}: {told}"
        told += pool.events(0.1)
    return told


def test_a_run_tells_its_newest_stage_and_then_its_end_and_its_actor_takes_the_next_one(
    pool_of: Callable[..., RayPool],
) -> None:
    run, cluster = Run(), Cluster({"CPU": 2.0})
    pool = pool_of(cluster, run)
    pool.start(1, JOB, {})
    assert events_until(pool, "stage") == [Event(1, "stage", "train", 3, 10)]
    run.may_end.set()
    assert events_until(pool, "finished")[-1] == Event(1, "finished")
    pool.start(1, JOB, {})
    assert events_until(pool, "finished")[-1] == Event(1, "finished")
    assert run.num_begun == 2
    assert len(cluster.hired) == 1


def test_a_run_without_a_result_has_failed_and_nothing_more_is_told_of_it(pool_of: Callable[..., RayPool]) -> None:
    pool = pool_of(Cluster({"CPU": 1.0}), lambda _: False)
    pool.start(0, JOB, {})
    assert events_until(pool, "failed") == [Event(0, "failed")]
    assert [list(pool.events(0.05)) for _ in range(3)] == [[], [], []]


def test_a_node_that_does_not_see_the_folder_halts_the_campaign(pool_of: Callable[..., RayPool], folder: Path) -> None:
    pool = pool_of(Cluster({"CPU": 1.0}))
    (folder / "campaign.json").unlink()
    pool.start(0, JOB, {})
    halted = events_until(pool, "halted")[-1]
    assert f"does not see the campaign's folder {folder}" in halted.message
    assert socket.gethostname() in halted.message


def test_a_death_in_the_middle_is_told_once_and_the_next_run_gets_a_new_actor(pool_of: Callable[..., RayPool]) -> None:
    run, cluster = Run(), Cluster({"CPU": 1.0})
    pool = pool_of(cluster, run)
    pool.start(0, JOB, {})
    assert [event.kind for event in events_until(pool, "stage")] == ["stage"]
    cluster.hired[0].lose(message="node 7 is gone")
    (death,) = events_until(pool, "died")
    assert (death.worker, death.kind) == (0, "died")
    assert death.message.endswith("node 7 is gone\n")
    assert not pool.events(0.05)
    run.may_end.set()
    pool.start(0, JOB, {})
    assert events_until(pool, "finished")[-1] == Event(0, "finished")
    assert len(cluster.hired) == 2


def test_a_stage_that_is_lost_is_no_death(pool_of: Callable[..., RayPool]) -> None:
    run, cluster = Run(), Cluster({"CPU": 1.0})
    pool = pool_of(cluster, run)
    pool.start(0, JOB, {})
    events_until(pool, "stage")
    cluster.hired[0].lose("told")
    assert not pool.events(0.05)
    run.may_end.set()
    assert events_until(pool, "finished") == [Event(0, "finished")]


def test_a_mistake_in_an_actor_is_raised_and_not_taken_for_a_death(pool_of: Callable[..., RayPool]) -> None:
    def mistaken(_: object) -> bool:
        raise TypeError("a mistake of ours")

    pool = pool_of(Cluster({"CPU": 1.0}), mistaken)
    pool.start(0, JOB, {})
    with pytest.raises(RayTaskError, match="a mistake of ours"):
        events_until(pool, "died")


def test_after_a_node_is_gone_a_worker_that_ends_its_run_makes_room(pool_of: Callable[..., RayPool]) -> None:
    """Else the run of a worker that is hired anew would wait for a CPU that an idle actor holds."""
    run, cluster = Run(), Cluster({"CPU": 2.0})
    pool = pool_of(cluster, run)
    assert pool.size == 2
    pool.start(0, JOB, {})
    pool.start(1, JOB, {})
    cluster.resources["CPU"] = 1.0
    assert pool.size == 1
    run.may_end.set()
    told = events_until(pool, "finished")
    while sum(event.kind == "finished" for event in told) < 2:
        told += pool.events(0.1)
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
    cluster = Cluster(resources)
    pool = pool_of(cluster, **options)
    assert pool.size == size
    pool.start(0, JOB, {})
    chosen = cluster.hired[0].options
    assert {name: chosen.get(name) for name in ("num_gpus", "num_cpus") if name in chosen} == room


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "--workers 0 is this process alone, --ray is a cluster"),
        ({"device": "cuda:1"}, "On a cluster --device is auto, cpu, cuda, not 'cuda:1'"),
    ],
)
def test_what_makes_no_sense_on_a_cluster_is_refused(
    options: dict[str, Any], message: str, pool_of: Callable[..., RayPool]
) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_of(Cluster({"CPU": 2.0}), **options)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address where something answers; Ray's own meaning of an address is the address itself."""
    services: Any = ModuleType("ray._private.services")
    services.canonicalize_bootstrap_address = lambda address: address
    monkeypatch.setitem(sys.modules, "ray._private", ModuleType("ray._private"))
    monkeypatch.setitem(sys.modules, "ray._private.services", services)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_without_cpus_and_gpus_is_refused_and_left_again(
    pool_of: Callable[..., RayPool], listening: str
) -> None:
    cluster = Cluster({"memory": 1e9}, is_joined=False)
    with pytest.raises(ConfigError, match=f"cluster at {listening} offers neither CPUs nor GPUs"):
        pool_of(cluster, address=listening)
    assert not cluster.is_joined


@pytest.mark.parametrize("refusal", [SystemExit("no GCS there"), ConnectionError("no GCS there")])
def test_what_listens_but_is_no_cluster_is_one_line(
    refusal: BaseException, pool_of: Callable[..., RayPool], listening: str
) -> None:
    with pytest.raises(ConfigError, match=rf"No Ray cluster answers at {listening} \(no GCS there\)"):
        pool_of(Cluster({"CPU": 1.0}, is_joined=False, refusal=refusal), address=listening)


@pytest.mark.parametrize("was_joined", [True, False])
def test_closing_ends_every_actor_and_leaves_a_cluster_only_if_it_was_joined_here(
    was_joined: bool, pool_of: Callable[..., RayPool], listening: str
) -> None:
    run, cluster = Run(), Cluster({"CPU": 2.0}, is_joined=was_joined)
    pool = pool_of(cluster, run, address=listening)
    pool.start(0, JOB, {})
    pool.start(1, JOB, {})
    cluster.hired[0].is_killed = True  # by the user, meanwhile
    pool.close()
    run.may_end.set()
    assert [actor.is_killed for actor in cluster.hired] == [True, True]
    assert cluster.is_joined == was_joined


def test_an_actor_reads_relative_paths_as_its_driver_does_where_its_node_has_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "driver").mkdir()
    ray_pool._Actor(Worker(Store(tmp_path), Place()), tmp_path / "driver")
    assert Path.cwd() == tmp_path / "driver"
    ray_pool._Actor(Worker(Store(tmp_path), Place()), tmp_path / "elsewhere")
    assert Path.cwd() == tmp_path / "driver"
