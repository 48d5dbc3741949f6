"""From a campaign to its runs: the product of each study's axes, after its search has chosen.

A search whose best learning rate is the largest or the smallest that was tried goes on beyond it, twice or half as
large, one trial at a time: the plan then grows as outcomes come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from frozencore.errors import ConfigError
from frozencore.tune.run.config import RunConfig
from frozencore.tune.run.record import Failure, RunRecord, TunedRecord
from frozencore_lab.campaign.job import Job, make_job
from frozencore_lab.campaign.spec import MOST_RUNS, Campaign, Search, Study
from frozencore_lab.campaign.study_options import Value

Phase = Literal["search", "final"]
RATE = "learning_rate"
Axes = dict[str, Value]


@dataclass(frozen=True)
class Outcome:
    """What became of a run: a record, or why there is none."""

    record: RunRecord | None = None
    failure: Failure | None = None


Outcomes = Callable[[str], Outcome | None]
"""The outcome of a run by its id; None while there is none."""


@dataclass(frozen=True)
class Planned:
    """One run that a study asks for.

    Attributes:
        axes: The study's axes with this run's values; a search trial has its own options and no seed.
        job: None for a final run whose search is not over, or chose nothing.
        blocked: Why there will be no job, if so.
    """

    study: str
    phase: Phase
    axes: Axes
    job: Job | None
    blocked: str = ""


@dataclass(frozen=True)
class Choice:
    """What a search chose for one group: the trial's options, and how each trial did on the validation rows.

    Attributes:
        at_end: The chosen learning rate is the largest or the smallest that was tried: the best one may lie beyond it.
    """

    options: Axes
    trials: tuple[tuple[Axes, float | None], ...]
    at_end: bool = False


def plan(campaign: Campaign, outcome: Outcomes) -> list[Planned]:
    """Every run of the campaign, in the order of the file; a run that several studies ask for comes once for each.

    Raises:
        ConfigError: A study's options contradict one another; the line names it.
    """
    planned: list[Planned] = []
    for name, study in campaign.studies.items():
        try:
            _require_few(len(planned) + prod(map(len, study.axes.values())))  # before they are made
            for runs in _of_study(campaign, name, study, outcome):
                planned += runs
                _require_few(len(planned))
        except ConfigError as error:
            raise ConfigError(f"Study {name!r}: {error}") from error
    return planned


def _require_few(num_runs: int) -> None:
    if num_runs > MOST_RUNS:
        raise ConfigError(f"a campaign may have at most {MOST_RUNS:,} runs. Split it.")


@dataclass(frozen=True)
class _Group:
    """Runs of a study that differ in their seed alone, and the trials of its grid: a single one is no search."""

    axes: Axes
    options: dict[str, Any]
    trials: list[Axes]

    @property
    def is_searched(self) -> bool:
        return len(self.trials) > 1


def _groups(campaign: Campaign, study: Study) -> Iterator[_Group]:
    others = {axis: values for axis, values in study.axes.items() if axis != "seed"}
    for axes in _products(others):
        options: dict[str, Any] = campaign.options_of(study, axes)
        options["model"] = campaign.models[str(axes["model"])]
        method = str(axes.get("method") or options.get("method", RunConfig.model_fields["method"].default))
        yield _Group(axes, options, _products(study.search.grid(method)) if study.search else [{}])


def _of_study(campaign: Campaign, name: str, study: Study, outcome: Outcomes) -> Iterator[list[Planned]]:
    seeds = study.axes["seed"]
    for group in _groups(campaign, study):
        if not group.is_searched:
            yield [_final(name, study, group, seed, group.trials[0]) for seed in seeds]
            continue
        trials, outcomes = _tried(study, group, outcome)
        jobs = [_trial(study, group, trial) for trial in trials]
        yield [Planned(name, "search", group.axes | trial, job) for trial, job in zip(trials, jobs, strict=True)]
        choice = choose(trials, outcomes, study) if outcomes else None
        if choice is not None:
            yield [_final(name, study, group, seed, choice.options) for seed in seeds]
            continue
        blocked = _why_blocked(outcomes) if outcomes else ""
        yield [Planned(name, "final", {**group.axes, "seed": seed}, None, blocked) for seed in seeds]


def _tried(study: Study, group: _Group, outcome: Outcomes) -> tuple[list[Axes], list[Outcome] | None]:
    """The trials of a search so far, and what became of each; None for the latter while one has not ended."""
    assert study.search is not None
    trials = list(group.trials)
    while True:
        outcomes = _all_ended([_trial(study, group, trial) for trial in trials], outcome)
        choice = choose(trials, outcomes, study) if outcomes else None
        further = _beyond(study.search, trials, choice, len(trials) - len(group.trials)) if choice else None
        if further is None:
            return trials, outcomes
        trials.append(further)


def _beyond(search: Search, trials: list[Axes], choice: Choice, num_added: int) -> Axes | None:
    """The next trial of a search that is not over: the best one with twice or half its learning rate.

    Returns:
        None if the best learning rate lies between others, or if as many trials were added as may be.
    """
    if not choice.at_end or num_added >= search.beyond:
        return None
    rate = choice.options[RATE]
    assert isinstance(rate, int | float)
    factor = 2 if rate == max(_rates_beside(trials, choice.options)) else 0.5
    return {**choice.options, RATE: rate * factor}


def _rates_beside(trials: list[Axes], chosen: Axes) -> list[float]:
    """The learning rates that were tried with the other options of a trial, its own among them."""
    rates = (trial[RATE] for trial in trials if RATE in chosen and {**trial, RATE: chosen[RATE]} == chosen)
    return [rate for rate in rates if isinstance(rate, int | float)]


def _why_blocked(outcomes: list[Outcome]) -> str:
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    first = f" ({failures[0].reason}: {failures[0].message})" if failures else ""
    return f"no trial of the search succeeded{first}"


def choose(trials: list[Axes], outcomes: list[Outcome], study: Study) -> Choice | None:
    """The trial that did best on the validation rows, the first of equal ones; None if none has a number."""
    assert study.search is not None
    by_accuracy = study.search.select == "accuracy"
    best: tuple[tuple[float, float], Axes] | None = None
    scores: list[float | None] = []
    for trial, found in zip(trials, outcomes, strict=True):
        record = found.record
        if not isinstance(record, TunedRecord):
            scores.append(None)
            continue
        if by_accuracy and not record.has("accuracy"):
            raise ConfigError("its search selects by accuracy, but the task has none. Use select: held_out_loss.")
        loss, accuracy = record.held_out_loss, record.accuracy if by_accuracy else 0.0
        scores.append(accuracy if by_accuracy else loss)
        if loss is None or accuracy is None:
            continue
        key = (accuracy, -loss)
        if best is None or key > best[0]:
            best = key, trial
    if best is None:
        return None
    rates = _rates_beside(trials, best[1])
    at_end = len(rates) > 1 and best[1][RATE] in (min(rates), max(rates))
    return Choice(best[1], tuple(zip(trials, scores, strict=True)), at_end)


def choices(campaign: Campaign, outcome: Outcomes) -> list[tuple[str, Axes, Choice]]:
    """What every finished search chose: study, group, choice."""
    chosen = []
    for name, study in campaign.studies.items():
        for group in _groups(campaign, study):
            if not group.is_searched:
                continue
            trials, outcomes = _tried(study, group, outcome)
            choice = choose(trials, outcomes, study) if outcomes else None
            if choice is not None:
                chosen.append((name, group.axes, choice))
    return chosen


def most_further_trials(campaign: Campaign, outcome: Outcomes) -> int:
    """How many trials searches may yet add beyond the ends of their grids."""
    count = 0
    for study in campaign.studies.values():
        for group in _groups(campaign, study) if study.search else ():
            has_ends = len({trial.get(RATE) for trial in group.trials}) > 1
            trials, outcomes = _tried(study, group, outcome)
            if has_ends and outcomes is None:
                assert study.search is not None
                count += max(0, study.search.beyond - len(trials) + len(group.trials))
    return count


def _all_ended(jobs: list[Job], outcome: Outcomes) -> list[Outcome] | None:
    """What became of every trial; None while one has neither finished nor failed."""
    found = [ended for job in jobs if (ended := outcome(job.id))]
    return found if len(found) == len(jobs) else None


def _trial(study: Study, group: _Group, trial: Axes) -> Job:
    assert study.search is not None
    return make_job(study.kind, {**group.options, **trial, "seed": study.search.seed, "evaluate_on": "validation"})


def _final(name: str, study: Study, group: _Group, seed: Value, chosen: Axes) -> Planned:
    job = make_job(study.kind, {**group.options, **chosen, "seed": seed}, study.reference_size)
    return Planned(name, "final", {**group.axes, "seed": seed}, job)


def _products(axes: Mapping[str, tuple[Value, ...]]) -> list[Axes]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
