"""The driver: give ready runs to workers until none is left, starting from any state of the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from frozencore.errors import ArtifactError
from frozencore.tune.record import Failure
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.plan import Planned, plan
from frozencore_lab.campaign.results import Tally, require_comparable, tally
from frozencore_lab.campaign.shared_moments import Needs, needs_of
from frozencore_lab.campaign.spec import Campaign
from frozencore_lab.campaign.store import Store
from frozencore_lab.campaign.worker_pool import Event, WorkerPool

MOST_DEATHS = 3  # deaths of workers on one run, after which it counts as failed
WAIT_S = 0.5


Watch = Callable[[Tally, dict[int, Job], Event | None], None]
"""A function that is called with the campaign's counts, the job of each busy worker, and the latest event if any."""


def drive(campaign: Campaign, store: Store, pool: WorkerPool, watch: Watch, *, retry_failed: bool = False) -> Tally:
    """Run everything that neither finished nor failed. It can be interrupted at any time and resumed.

    Raises:
        ArtifactError: Another process drives the campaign, its folder cannot be written, or it holds runs of another
            version whose numbers differ.
    """
    with store.locked("driver", wait=False):
        store.open(campaign)
        if retry_failed:
            store.forget_failures()
        try:
            return _Driver(campaign, store, pool, watch).run()
        finally:
            pool.close()
            store.write_index()


@dataclass
class _Driver:
    campaign: Campaign
    store: Store
    pool: WorkerPool
    watch: Watch
    running: dict[int, Job] = field(default_factory=dict)
    queue: list[Job] = field(default_factory=list)
    needs: Needs = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    last_model: dict[int, str] = field(default_factory=dict)
    counts: Tally = field(default_factory=lambda: Tally(0, 0, 0, 0))
    trials: set[str] = field(default_factory=set)
    is_stale: bool = False

    def run(self) -> Tally:
        require_comparable(self._plan(), self.store, with_missing=True)
        while True:
            self._start_jobs()
            self.watch(self.counts, self.running, None)
            if not self.running:
                return self.counts
            for event in self.pool.events(WAIT_S):
                self._handle(event)

    def _plan(self) -> list[Planned]:
        self.is_stale = False
        planned = plan(self.campaign, self.store.outcome)
        self.needs = needs_of(run.job for run in planned if run.job)
        self.counts = tally(planned, self.store)
        busy = {job.id for job in self.running.values()}
        self.trials = {run.job.id for run in planned if run.job and run.phase == "search"}
        # searches first, so that the runs that they reveal are known early enough to share moments
        ready = sorted((run for run in planned if run.job), key=lambda run: run.phase == "final")
        jobs = {run.job.id: run.job for run in ready if run.job}
        self.queue = [job for job in jobs.values() if job.id not in busy and self.store.outcome(job.id) is None]
        return planned

    def _start_jobs(self) -> None:
        for worker in range(self.pool.size):
            if worker in self.running:
                continue
            job = self._next(worker)
            if self.is_stale and (job is None or job.id not in self.trials):  # runs that a search revealed come first
                self._plan()
                job = self._next(worker)
            if job is not None:
                self.queue.remove(job)
                self.running[worker] = job
                self.last_model[worker] = job.config.model.name
                self.pool.start(worker, job, self.needs)

    def _next(self, worker: int) -> Job | None:
        """The next run, preferably with the worker's loaded model; one that must be alone comes when all have ended."""
        shareable = [job for job in self.queue if not job.kind.is_alone]
        if not shareable:
            return self.queue[0] if self.queue and not self.running else None
        return next((job for job in shareable if job.config.model.name == self.last_model.get(worker)), shareable[0])

    def _handle(self, event: Event) -> None:
        if event.kind != "stage":
            job = self.running.pop(event.worker)
            if event.kind == "halted":
                raise ArtifactError(event.message)
            if event.kind == "died":
                self._record_death(job, event.message)
                self._plan()
            else:  # new runs are planned only when needed, because planning takes time
                now, end = self.counts, "failed" if event.kind == "failed" else "finished"
                self.counts = replace(now, ready=now.ready - 1, **{end: getattr(now, end) + 1})
                self.is_stale |= job.id in self.trials
        self.watch(self.counts, self.running, event)

    def _record_death(self, job: Job, known: str) -> None:
        self.deaths[job.id] += 1
        if self.deaths[job.id] < MOST_DEATHS:
            return
        message = f"{MOST_DEATHS} workers died in this run: killed from outside, or out of memory"
        with ExitStack() as held:
            try:
                held.enter_context(self.store.locked(f"run-{job.id}", wait=False))
            except ArtifactError:
                return  # another process makes this run now, in the folder that a failure removes
            self.store.fail(job.id, Failure(reason="worker died", message=message, config=job.resolved), known)
