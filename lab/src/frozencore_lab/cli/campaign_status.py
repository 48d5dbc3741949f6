"""What ``frozencore campaign status`` says; it imports nothing that only a run needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from frozencore.tune.run.record import Failure
from frozencore_lab.campaign.plan import Planned, plan
from frozencore_lab.campaign.results import tally, time_to_go
from frozencore_lab.campaign.store import Store


def status_lines(folder: Path) -> Iterator[str]:
    """How a campaign stands, from its folder alone."""
    store = Store(folder)
    campaign = store.campaign()
    planned = plan(campaign, store.outcome)
    standing = tally(planned, store)
    running = store.running_now()
    yield (
        f"{campaign.name}: {standing.finished} done, {len(running)} running, {standing.failed} failed, "
        f"{max(0, standing.left - len(running))} left{time_to_go(planned, store, len(running))}"
    )
    yield from failure_lines(planned, store)


def failure_lines(planned: Iterable[Planned], store: Store) -> Iterator[str]:
    """Why runs failed, a line each."""
    for run in planned:
        failure = store.outcome(run.job.id) if run.job else None
        if run.job and isinstance(failure, Failure):
            axes = ", ".join(f"{name} {value}" for name, value in run.axes.items())
            yield (
                f"{run.study} ({axes}), run {run.job.id}: {failure.reason}: {failure.message} "
                f"Log: {store.failed / run.job.id / 'log.txt'}"
            )
