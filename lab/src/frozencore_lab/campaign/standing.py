"""How a campaign stands: what is done, what is left, and how long that may take at the pace so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from frozencore.tune.run.record import TunedRecord
from frozencore.words import time_in_words
from frozencore_lab.campaign.plan import Planned
from frozencore_lab.campaign.store import Store


@dataclass(frozen=True)
class Tally:
    """How a campaign stands. A search that is not over still hides runs: they count as ``waiting``."""

    finished: int
    failed: int
    ready: int
    waiting: int

    @property
    def left(self) -> int:
        return self.ready + self.waiting


def tally(planned: Sequence[Planned], store: Store) -> Tally:
    """How many different runs have finished, failed, are ready, and wait for a search."""
    jobs = {run.job.id: run for run in planned if run.job}
    outcomes = [store.outcome(run_id) for run_id in jobs]
    finished = sum(outcome is not None and outcome.record is not None for outcome in outcomes)
    failed = sum(outcome is not None and outcome.failure is not None for outcome in outcomes)
    hidden = [run for run in planned if run.job is None]
    blocked = sum(bool(run.blocked) for run in hidden)
    return Tally(finished, failed + blocked, len(jobs) - finished - failed, len(hidden) - blocked)


def time_to_go(planned: Sequence[Planned], store: Store, num_running: int) -> str:
    """Words for the time that is left at the pace of the finished runs; empty while there is nothing to go by."""
    measured, left = measured_seconds(planned, store), tally(planned, store).left
    if not measured or not left:
        return ""
    seconds = mean(measured) * left / max(1, num_running)
    return f", about {time_in_words(seconds)} to go on {max(1, num_running)} workers"


def measured_seconds(planned: Sequence[Planned], store: Store) -> list[float]:
    """What the finished runs took."""
    outcomes = [store.outcome(run.job.id) for run in planned if run.job]
    records = [outcome.record for outcome in outcomes if outcome and isinstance(outcome.record, TunedRecord)]
    return [record.total_s for record in records if record.total_s is not None]
