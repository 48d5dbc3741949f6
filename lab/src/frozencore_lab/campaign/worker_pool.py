"""Workers of a campaign on this machine: in this process, or in processes of their own, one per device.

A process of its own imports this file first. It imports no library that warns at its import: those come with the
worker, after their known warnings are silenced.
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

from frozencore.errors import ArtifactError
from frozencore.quiet import ignore_known_warnings
from frozencore.torch_later import torch
from frozencore.words import Progress

if TYPE_CHECKING:
    from frozencore_lab.campaign.job import Job
    from frozencore_lab.campaign.shared_moments import Needs
    from frozencore_lab.campaign.worker import Worker

TELL_EVERY_S = 0.2
GOOD_BYE_S = 5.0  # an idle worker ends by itself when its connection closes
LAST_STEP_S = 20.0  # a busy one when it has its checkpoint; schedulers kill after 30 s


@dataclass(frozen=True)
class Event:
    """What a worker tells: a stage of its run, the end of it, or (told by the pool) the end of the worker.

    Attributes:
        kind: ``halted`` is the end of every run: the campaign's folder is full, read-only or out of sight.
        done, total: Steps of the stage.
        message: Why it halted, or what is known of a death.
    """

    worker: int
    kind: Literal["stage", "finished", "failed", "halted", "died"]
    stage: str = ""
    done: int = 0
    total: int | None = None
    message: str = ""


class WorkerPool(Protocol):
    """Workers that make one run at a time. A worker that died is replaced by itself at its next run. One
    with processes of its own makes each run that is to be alone in a new one."""

    @property
    def size(self) -> int:
        """How many there are; it may change while they run."""

    def start(self, worker: int, job: Job, needs: Needs) -> None:
        """Give an idle worker a run."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since; waits for something at most that long."""

    def close(self) -> None:
        """End the workers, whatever they do."""


def end_of_run(number: int, worker: Worker, job: Job, needs: Needs, progress: Progress) -> Event:
    """Make a run, and tell how it ended."""
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
        self._events.append(end_of_run(worker, self._worker, job, needs, lambda *_: None))

    def events(self, timeout_s: float) -> Sequence[Event]:
        told, self._events = self._events, []
        return told

    def close(self) -> None:
        """There is nothing to end."""


class LocalPool:
    """Processes of this machine.

    Args:
        worker: What each of them is; it has run nothing.
        devices: Where each worker computes, in turn; ``("auto",)`` leaves it to the runs.
    """

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
            self._dismiss(worker)  # what earlier runs left in a process would count as this one's memory
        if worker not in self._connections:
            self._hire(worker)
        try:
            self._connections[worker].send((job, needs))
        except OSError:  # it was killed while it had nothing to do
            self._dismiss(worker)
            self._hire(worker)
            self._connections[worker].send((job, needs))
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
            self._processes[worker].terminate()  # all at once: each ends after the step that it is at
        for worker in list(self._connections):
            self._dismiss(worker)

    def _hire(self, worker: int) -> None:
        ours, theirs = self._context.Pipe()
        threads = max(1, torch.get_num_threads() // self.size)  # of those that the user leaves to torch
        process = self._context.Process(target=_work, args=(theirs, os.getpid(), worker, threads))
        process.start()
        theirs.close()
        ours.send(self._workers[worker])
        self._processes[worker], self._connections[worker] = process, ours

    def _dismiss(self, worker: int) -> None:
        process = self._processes[worker]
        if worker in self._busy:
            process.join(LAST_STEP_S)  # before its connection closes, on which it tells how far it is
        self._connections.pop(worker).close()
        if worker not in self._busy:
            process.join(GOOD_BYE_S)
        self._busy.discard(worker)
        process.kill()
        process.join()


def _work(connection: Connection, driver: int, number: int, num_threads: int) -> None:
    """A worker process: receives its worker, then runs what it is sent, until its driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver ends its workers
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    ignore_known_warnings()
    worker = connection.recv()
    torch.set_num_threads(num_threads)
    gc.freeze()  # every training looks for garbage: not among all that was imported, then
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
    """A worker whose driver was killed would go on unseen, beside the next driver's."""
    while os.getppid() == driver:
        time.sleep(0.5)
    os._exit(1)
