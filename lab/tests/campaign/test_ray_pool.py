"""A campaign on a Ray cluster of two nodes, started here, one of which is killed in the middle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from frozencore_lab.campaign.driver import drive
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker import Place, Worker
from frozencore_lab.campaign.worker_pool import Event, OwnProcess
from undisturbed import ENVIRONMENT, TWO_METHODS, index_of, results_of, specification

Command = Callable[..., tuple[int, str, str]]
NOTICE_SOON = {  # that a node is gone; by default it takes Ray a quarter of a minute
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}

A_LOADED_MACHINE_S = 180


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each; this process is on the first."""
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    nodes = cluster_utils.Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": NOTICE_SOON},
    )
    nodes.add_node(num_cpus=1, wait=False)
    nodes.wait_for_nodes(A_LOADED_MACHINE_S)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    from frozencore_lab.campaign.ray_pool import RayPool

    campaign = read_campaign(specification(tmp_path, TWO_METHODS))
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    torch.set_num_threads(1)
    drive(campaign, here, OwnProcess(Worker(here, Place(), keep_adapters=True)), lambda *_: None)

    pool = RayPool(cluster.address, None, Worker(there, Place(), keep_adapters=True))
    assert pool.size == 2
    told: list[Event] = []
    sizes: list[int] = []

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


def test_without_ray_it_is_one_line(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # import ray fails
    status, _, errors = run_on("auto", command, tmp_path)
    assert (status, errors.splitlines()) == (
        2,
        ["frozencore: --ray needs Ray, which is not installed: pip install 'frozencore-lab[ray]'."],
    )


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1 ("),
        ("nowhere", "No Ray cluster answers at nowhere ("),
        ("ray://127.0.0.1:10001", "--ray takes HOST:PORT or auto, got ray://127.0.0.1:10001."),
    ],
)
def test_an_address_where_no_cluster_answers_is_one_line(
    address: str, line: str, command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    status, _, errors = run_on(address, command, tmp_path)
    (only,) = errors.splitlines()
    assert status == 2
    assert only.startswith(f"frozencore: {line}")
    assert not (tmp_path / "out").exists()


def run_on(address: str, command: Command, tmp_path: Path) -> tuple[int, str, str]:
    spec = specification(tmp_path, TWO_METHODS)
    return command("campaign", "run", spec, "--output", tmp_path / "out", "--ray", address)
