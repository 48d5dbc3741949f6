"""Workers of a campaign on this machine: in this process, or in separate processes, one per device.

A worker process imports this file first. This file imports no library that warns when imported; such libraries are
imported with the worker, after known warnings are silenced.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Literal, Protocol

from frozencore.device import torch
from frozencore.errors import ArtifactError
from frozencore.progress import Progress, no_progress
from frozencore.quiet import ignore_known_warnings

if TYPE_CHECKING:
    from frozencore_lab.campaign.job import Job
    from frozencore_lab.campaign.shared_moments import Needs
    from frozencore_lab.campaign.worker import Worker

TELL_EVERY_S = 0.2
GOOD_BYE_S = 5.0  # time for an idle worker to end after its connection closes
LAST_STEP_S = 20.0  # time for a busy worker to write its checkpoint; schedulers kill after 30 s


@dataclass(frozen=True)
class Event:
    """A worker's event: a stage of its run, the end of the run, or (from the pool) the death of the worker.

    Attributes:
        kind: ``halted`` ends all runs: the campaign's folder is full, read-only or unreachable.
        done, total: Steps of the stage.
        message: The reason of halting, or the known cause of a death.
    """

    worker: int
    kind: Literal["stage", "finished", "failed", "halted", "died"]
    stage: str = ""
    done: int = 0
    total: int | None = None
    message: str = ""


class WorkerPool(Protocol):
    """Workers that make one run at a time. A dead worker is replaced at its next run. A pool with its own processes
    makes each run that must be alone in a new process."""

    @property
    def size(self) -> int:
        """The number of workers; it may change during runs."""

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        """Give an idle worker a run."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """The events since the last call; waits for one until the timeout."""

    def close(self) -> None:
        """End all workers, busy or not."""


def end_of_run(number: int, worker: Worker, job: Job, needs: Needs, progress: Progress) -> Event:
    """Make a run and return its end."""
    try:
        return Event(number, "finished" if worker.run(job, needs, progress) else "failed")
    except ArtifactError as error:
        return Event(number, "halted", message=str(error))


class OwnProcess:
    """A pool of one: this process."""

    size = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._events: list[Event] = []

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        self._events.append(end_of_run(worker, self._worker, job, needs, no_progress))

    def events(self, timeout_s: float) -> Sequence[Event]:
        told, self._events = self._events, []
        return told

    def close(self) -> None:
        """Do nothing."""


class LocalPool:
    """A pool of processes on this machine, with these devices in turn; ``auto`` lets the runs choose."""

    def __init__(self, size: int, worker: Worker, *, devices: Sequence[str] = ("auto",)) -> None:
        self.size = size
        self._context = multiprocessing.get_context("spawn")
        places = [replace(worker.place, device=devices[i % len(devices)]) for i in range(size)]
        self._workers = [replace(worker, place=place) for place in places]
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._busy: set[int] = set()

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        if job.kind.is_alone and worker in self._connections:
            self._dismiss(worker)  # memory left by earlier runs would count for this run
        try:
            self._connection(worker).send((job, needs))
        except OSError:  # killed while idle
            self._dismiss(worker)
            self._connection(worker).send((job, needs))
        self._busy.add(worker)

    def events(self, timeout_s: float) -> Sequence[Event]:
        told: list[Event] = []
        by_connection = {connection: worker for worker, connection in self._connections.items()}
        for connection in wait(list(by_connection), timeout_s):
            worker = by_connection[connection]  # type: ignore[index]  # wait gives back what it was given
            try:
                told.append(self._connections[worker].recv())
                if told[-1].kind != "stage":
                    self._busy.discard(worker)
            except (EOFError, OSError):
                if worker in self._busy:
                    told.append(Event(worker, "died"))
                self._dismiss(worker)
        return told

    def close(self) -> None:
        for worker in self._busy:
            self._processes[worker].terminate()  # all at once; each ends after its current step
        for worker in list(self._connections):
            self._dismiss(worker)

    def _connection(self, worker: int) -> Connection:
        """The connection to a worker's process, which is started if there is none."""
        if worker not in self._connections:
            ours, theirs = self._context.Pipe()
            threads = max(1, torch.get_num_threads() // self.size)  # share of torch's threads
            process = self._context.Process(target=_work, args=(theirs, os.getpid(), worker, threads))
            process.start()
            theirs.close()
            ours.send(self._workers[worker])
            self._processes[worker], self._connections[worker] = process, ours
        return self._connections[worker]

    def _dismiss(self, worker: int) -> None:
        process = self._processes[worker]
        if worker in self._busy:
            process.join(LAST_STEP_S)  # before closing the connection, on which it reports progress
        self._connections.pop(worker).close()
        if worker not in self._busy:
            process.join(GOOD_BYE_S)
        self._busy.discard(worker)
        process.kill()
        process.join()


def _work(connection: Connection, driver: int, number: int, num_threads: int) -> None:
    """Run a worker process: receive the worker, then make runs until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, but the driver ends its workers
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    ignore_known_warnings()
    worker = connection.recv()
    torch.set_num_threads(num_threads)
    gc.freeze()  # speeds up garbage collection, which every training runs
    told_at = 0.0

    def tell(stage: str, done: int, total: int | None, _: str = "") -> None:
        nonlocal told_at
        if time.monotonic() - told_at > TELL_EVERY_S:
            told_at = time.monotonic()
            connection.send(Event(number, "stage", stage, done, total))

    while True:
        try:
            job, needs = connection.recv()
        except EOFError:
            return
        connection.send(end_of_run(number, worker, job, needs, tell))


def _end_with(driver: int) -> None:
    """End this worker if its driver was killed; otherwise it would continue beside the next driver's workers."""
    while os.getppid() == driver:
        time.sleep(0.5)
    os._exit(1)
