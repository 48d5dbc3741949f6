"""The state of a campaign, read from records alone: its counts, the mean time of a run, and the outcome of each run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from frozencore.errors import ArtifactError
from frozencore.options import fingerprint_options, options_of
from frozencore.text import time_in_words
from frozencore.tune.config import PLACES
from frozencore.tune.config_parts import RowsConfig
from frozencore.tune.provenance import STEPS_VERSION
from frozencore.tune.record import Failure, RunRecord, TunedRecord
from frozencore_lab.campaign.job import Job
from frozencore_lab.campaign.plan import Axes, Choice, Planned, choices, plan
from frozencore_lab.campaign.spec import Campaign, Study
from frozencore_lab.campaign.store import Store

# no row that trains or scores depends on these options of the rows
_NOT_ROWS = ("data_root", "calibration_size", "calibration_batch", "calibration_data", "seed")
_DECIDE_ROWS = (*(name for name in options_of(RowsConfig) if name not in _NOT_ROWS), "model", "evaluate_on")


@dataclass(frozen=True)
class Tally:
    """The numbers of runs by state. Runs that depend on a running search count as ``waiting``."""

    finished: int
    failed: int
    ready: int
    waiting: int

    @property
    def left(self) -> int:
        return self.ready + self.waiting


def tally(planned: Sequence[Planned], store: Store) -> Tally:
    """Count the different runs that have finished, failed, are ready, or wait for a search."""
    ended = [store.outcome(run_id) for run_id in {run.job.id for run in planned if run.job}]
    finished, failed = (sum(isinstance(end, kind) for end in ended) for kind in (RunRecord, Failure))
    hidden = [run for run in planned if run.job is None]
    blocked = sum(bool(run.blocked) for run in hidden)
    return Tally(finished, failed + blocked, len(ended) - finished - failed, len(hidden) - blocked)


def mean_time(planned: Sequence[Planned], store: Store) -> str:
    """The mean time of the finished runs, as the end of a sentence; empty if there are none."""
    ended = [store.outcome(run.job.id) for run in planned if run.job]
    seconds = [end.total_s for end in ended if isinstance(end, TunedRecord)]
    return f", {time_in_words(mean(seconds))} a run" if seconds else ""


@dataclass(frozen=True)
class FinalRun:
    """One final run of a study: the values of the study's axes, and its record or its failure."""

    axes: Axes
    run_id: str | None
    record: RunRecord | None
    failure: Failure | None


@dataclass(frozen=True)
class StudyResults:
    """The final runs of one study, and the choices of its search: group of axis values, choice."""

    name: str
    study: Study
    runs: tuple[FinalRun, ...]
    choices: tuple[tuple[Axes, Choice], ...]


@dataclass(frozen=True)
class CampaignResults:
    campaign: Campaign
    studies: tuple[StudyResults, ...]


def load_results(folder: Path) -> CampaignResults:
    """The results in a campaign's folder; ``ArtifactError`` if it is none, or its runs cannot be compared."""
    store = Store(folder)
    campaign = store.campaign()
    planned, chosen = plan(campaign, store.outcome), choices(campaign, store.outcome)
    require_comparable(planned, store)
    runs: dict[str, list[FinalRun]] = {name: [] for name in campaign.studies}
    for run in planned:
        if run.phase == "final":
            end = store.outcome(run.job.id) if run.job else None
            if run.blocked:
                end = Failure(reason="search", message=run.blocked)
            record, failure = (None, end) if isinstance(end, Failure) else (end, None)
            runs[run.study].append(FinalRun(run.axes, run.job.id if run.job else None, record, failure))
    made = {name: tuple((group, choice) for other, group, choice in chosen if other == name) for name in runs}
    studies = (StudyResults(name, study, tuple(runs[name]), made[name]) for name, study in campaign.studies.items())
    return CampaignResults(campaign, tuple(studies))


def require_comparable(planned: Sequence[Planned], store: Store, *, with_missing: bool = False) -> None:
    """Check that runs of several versions can be compared: an id holds neither inputs' content nor defaults.

    Args:
        with_missing: Include the runs that this version is going to make.

    Raises:
        ArtifactError: Runs that name the same model and dtype, or the same rows, were made on different ones; or a
            default or the steps of training differ.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    for run in planned:
        end = store.outcome(run.job.id) if run.job else None
        if run.job is None or isinstance(end, Failure) or (end is None and not with_missing):
            continue
        steps = STEPS_VERSION if end is None else end.provenance.steps_version
        traits = {("the version of the training's steps", ""): str(steps), **_defaults(run.job, end)}
        model, content = run.job.config.model.name, run.job.config.content()
        rows = {option: content[option] for option in _DECIDE_ROWS}
        rows["seed"] = run.job.config.rows.seed if run.job.config.rows.rows_by_seed else None
        rows["validates"] = run.job.config.scoring.choose_every is not None
        if isinstance(end, TunedRecord):
            which = fingerprint_options(rows)
            traits |= {
                (f"the {name} rows", which): made_on
                for name in ("train", "evaluation", "validation", "choices", "others")
                if (made_on := getattr(end.hashes, name)) is not None
            }
            traits[f"the weights of {model!r}", end.config.dtype] = end.hashes.model
        for trait, value in traits.items():
            found.setdefault(trait, {}).setdefault(value, run.job.id)
    for (what, _), runs in found.items():
        if len(runs) > 1:
            first, other = list(runs.values())[:2]
            raise ArtifactError(
                f"The runs {first} and {other} differ in {what}, which is no axis of the campaign, so they cannot be "
                "compared. Remove the wrong runs and run the campaign again, or choose another --out."
            )


def _defaults(job: Job, end: RunRecord | None) -> dict[tuple[str, str], str]:
    """The values of the options that a run leaves at their defaults, by name."""
    config = job.config.content()
    given = {*_flat(job.config.content(changed=True)), *PLACES, "dtype"}
    made_with = _flat(config if end is None else end.config.content())
    left = [name for name in _flat(config) if name not in given and name in made_with]
    return {(f"the default of {name}", ""): repr(made_with[name]) for name in left}


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, those of a group under the group's name and their own."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= {f"{name}.{own}": its for own, its in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def status_lines(folder: Path) -> Iterator[str]:
    """Yield the state of a campaign, read from its folder alone."""
    store = Store(folder)
    campaign = store.campaign()
    planned = plan(campaign, store.outcome)
    standing = tally(planned, store)
    running = store.running_now()
    yield (
        f"{campaign.name}: {standing.finished} done, {len(running)} running, {standing.failed} failed, "
        f"{max(0, standing.left - len(running))} left{mean_time(planned, store)}"
    )
    yield from failure_lines(planned, store)


def failure_lines(planned: Iterable[Planned], store: Store) -> Iterator[str]:
    """Yield a line for each failed run, with the reason."""
    for run in planned:
        failure = store.outcome(run.job.id) if run.job else None
        if run.job and isinstance(failure, Failure):
            axes = ", ".join(f"{name} {value}" for name, value in run.axes.items())
            yield (
                f"{run.study} ({axes}), run {run.job.id}: {failure.reason}: {failure.message} "
                f"Log: {store.log_of_failed(run.job.id)}"
            )
