"""Workers of a campaign on a Ray cluster: one actor for each GPU, or for each CPU if there are no GPUs.

Ray passes only runs, stages and deaths. Results are written to the campaign's folder, which every node must see under
the same path. File locks there keep two nodes from making the same run.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from frozencore.errors import ConfigError
from frozencore.quiet import ignore_known_warnings
from frozencore.text import one_line
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.shared_moments import Needs
from frozencore_lab.campaign.store import SPECIFICATION
from frozencore_lab.campaign.worker import Worker
from frozencore_lab.campaign.worker_pool import Event, end_of_run

ANSWER_S = 5.0  # timeout of a port; Ray alone would wait 70 s
TELL_EVERY_S = 0.5
DEVICES = ("auto", "cpu", "cuda")


class RayPool:
    """A pool of actors on a Ray cluster. An actor that died is replaced at its next run, on any free node.

    Args:
        address: ``HOST:PORT`` of the cluster, or ``auto``; this process runs on one of its nodes.
        num_workers: The most workers; None is as many as the cluster allows.
        worker: The worker of each actor; every node sees its campaign's folder under the same path.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached or has no CPUs and GPUs.
    """

    def __init__(self, address: str, num_workers: int | None, worker: Worker) -> None:
        place = worker.place
        if num_workers == 0:
            raise ConfigError("--workers 0 is this process alone, --ray is a cluster: leave one of them out.")
        if place.device not in DEVICES:
            raise ConfigError(
                f"On a cluster --device is {', '.join(DEVICES)}, not {place.device!r}: Ray deals GPUs out."
            )
        self._ray, self._connected = _connect(address)
        self._num_workers = num_workers
        self._resource = "GPU" if place.device != "cpu" and self._offered("GPU") else "CPU"
        self._actor_arguments = (worker, Path.cwd())
        self._actors: dict[int, Any] = {}
        self._runs: dict[Any, int] = {}
        self._stages: dict[Any, int] = {}
        if not self._offered(self._resource):
            self.close()
            raise ConfigError(f"The Ray cluster at {address} offers neither CPUs nor GPUs. Add a node to it.")

    @property
    def size(self) -> int:
        """The number of workers that the cluster allows now; it changes when nodes come and go."""
        offered = max(1, self._offered(self._resource))
        return offered if self._num_workers is None else min(offered, self._num_workers)

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        if job.kind.is_alone and worker in self._actors:
            self._dismiss(worker)  # memory left by earlier runs would count for this run
        if worker not in self._actors:
            self._actors[worker] = self._start_actor()
        self._runs[self._actors[worker].run.remote(worker, job, needs)] = worker
        self._listen_to(worker)

    def events(self, timeout_s: float) -> Sequence[Event]:
        told: list[Event] = []
        ready, _ = self._ray.wait([*self._runs, *self._stages], timeout=timeout_s)
        for answer in ready:
            over = answer in self._runs
            worker = self._runs.pop(answer) if over else self._stages.pop(answer)
            try:
                told += self._ray.get(answer)
            except self._ray.exceptions.RayTaskError:
                raise  # a bug
            except self._ray.exceptions.RayError as error:
                if over:
                    self._forget(worker)
                    told.append(Event(worker, "died", message=f"Ray lost the worker's process or its node: {error}\n"))
                continue
            if not over:
                self._listen_to(worker)
            elif len(self._actors) > self.size:  # a node is gone, and another worker waits for this place
                self._dismiss(worker)
        return told

    def close(self) -> None:
        for actor in self._actors.values():
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._actors.clear()
        if self._connected:
            self._ray.shutdown()

    def _start_actor(self) -> Any:
        resources = {"num_gpus": 1} if self._resource == "GPU" else {"num_cpus": 1}
        actor = self._ray.remote(_Actor).options(max_concurrency=2, scheduling_strategy="SPREAD", **resources)
        return actor.remote(*self._actor_arguments)

    def _dismiss(self, worker: int) -> None:
        self._ray.kill(self._actors[worker])
        self._forget(worker)

    def _forget(self, worker: int) -> None:
        del self._actors[worker]
        self._stages = {answer: teller for answer, teller in self._stages.items() if teller != worker}

    def _listen_to(self, worker: int) -> None:
        if worker in self._runs.values() and worker not in self._stages.values():
            self._stages[self._actors[worker].told.remote()] = worker

    def _offered(self, resource: str) -> int:
        return int(self._ray.cluster_resources().get(resource, 0))


class _Actor:
    """A worker on a node. One thread makes the run; another reports its stage."""

    def __init__(self, worker: Worker, driven_from: Path) -> None:
        ignore_known_warnings()
        if driven_from.is_dir():
            os.chdir(driven_from)  # relative paths are relative to the driver's folder
        self._worker = worker
        self._newest: list[Event] = []
        self._changed = threading.Event()

    def run(self, number: int, job: Job, needs: Needs) -> list[Event]:
        """Make a run and return its end."""

        def tell(stage: str, done: int, total: int | None, _: str = "") -> None:
            self._newest = [Event(number, "stage", stage, done, total)]
            self._changed.set()

        try:
            folder = self._worker.store.folder
            if not (folder / SPECIFICATION).is_file():
                unseen = (
                    f"The node {socket.gethostname()} does not see the campaign's folder {folder}. "
                    "Choose a folder (--out) that every node of the cluster sees under the same path."
                )
                return [Event(number, "halted", message=unseen)]
            return [end_of_run(number, self._worker, job, needs, tell)]
        finally:
            self._newest = []
            self._changed.set()

    def told(self) -> list[Event]:
        """Wait for and return the newest stage; empty at the end of the run."""
        time.sleep(TELL_EVERY_S)
        self._changed.wait()
        self._changed.clear()
        return self._newest


def _connect(address: str) -> tuple[ModuleType, bool]:
    """Connect to Ray, and say whether this call connected; a process in a cluster stays in it."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs Ray, which is not installed: pip install 'frozencore-lab[ray]'.") from error
    if ray.is_initialized():
        return ray, False
    if "://" in address:
        raise ConfigError(f"--ray takes HOST:PORT or auto, got {address}. Start this command on a node of the cluster.")
    from ray._private.services import canonicalize_bootstrap_address  # what ray.init asks for the meaning of "auto"

    try:
        host, _, port = str(canonicalize_bootstrap_address(address)).rpartition(":")
        socket.create_connection((host, int(port)), ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (Exception, SystemExit) as error:  # SystemExit: something else than Ray listens there
        raise ConfigError(
            f"No Ray cluster answers at {address} ({one_line(str(error), 200)}). Start one with `ray start --head`, or "
            "give its HOST:PORT."
        ) from error
    return ray, True
