"""Plan the runs of a campaign: the product of each study's axes, with the options that its search chose.

If the best learning rate of a search is the largest or the smallest tried, the search adds a trial with twice or half
that rate, one at a time. The plan then grows as runs end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal

from frozencore.errors import ConfigError, DataError, NoRowsError
from frozencore.tune.config import RunConfig
from frozencore.tune.record import Failure, RunRecord, TunedRecord
from frozencore_lab.campaign.job import Job, Place, make_job
from frozencore_lab.campaign.spec import DEFAULT_METHOD, MOST_RUNS, Campaign, Search, Study, Value
from frozencore_lab.tasks.registry import task_of

Phase = Literal["search", "final"]
RATE = "learning_rate"
Axes = dict[str, Value]
Ended = RunRecord | Failure
"""The end of a run: its record, or its failure."""
Outcomes = Callable[[str], Ended | None]
"""A function that returns the end of a run by its id; None before it ends."""


@dataclass(frozen=True)
class Planned:
    """One run of a study.

    Attributes:
        axes: The study's axes with this run's values; a search trial has its own options and no seed.
        job: None for a final run whose search has not ended, or chose nothing.
        blocked: The reason if there will be no job.
    """

    study: str
    phase: Phase
    axes: Axes
    job: Job | None
    blocked: str = ""


@dataclass(frozen=True)
class Choice:
    """The chosen options of a group's search, and each trial's score.

    Attributes:
        beyond: The learning rate to try next if the chosen one is at an end of those tried; else None.
    """

    options: Axes
    trials: tuple[tuple[Axes, float | None], ...]
    beyond: float | None = None


@dataclass
class _Group:
    """Runs of a study that differ only in the seed, and the state of their search.

    Attributes:
        grid: The options of each trial in the file; a grid of one is no search.
        trials: The options of every trial so far: the grid, then trials beyond its ends.
        jobs: The jobs of the trials.
        ended: The end of each trial; None while one is running.
        choice: None while a trial is running, or if no trial has a score.
    """

    name: str
    study: Study
    axes: Axes
    options: dict[str, Any]
    grid: list[Axes]
    trials: list[Axes] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    ended: list[Ended] | None = None
    choice: Choice | None = None

    def follow(self, search: Search, outcome: Outcomes) -> None:
        """Read the ends of the trials, and add further trials if the search continues."""
        further, ended = self.grid, list[Ended]()
        while further:
            for options in further:
                given = {**self.options, **options, "seed": search.seed, "evaluate_on": "validation"}
                self.trials.append(options)
                self.jobs.append(make_job(self.study.kind.name, given))
            ended += [end for job in self.jobs[len(ended) :] if (end := outcome(job.id))]
            if len(ended) < len(self.jobs):
                return
            choice = _choose(self.trials, ended, search)
            num_added = len(self.trials) - len(self.grid)
            further = []
            if choice and choice.beyond is not None and num_added < search.beyond:
                next_trial = {**choice.options, RATE: choice.beyond}  # one that failed is not made again
                further = [next_trial] if next_trial not in self.trials else []
        self.ended, self.choice = ended, choice

    def runs(self) -> Iterator[Planned]:
        """The trials, and the final run of every seed, which has no job before the search has chosen."""
        for options, job in zip(self.trials, self.jobs, strict=True):
            yield Planned(self.name, "search", self.axes | options, job)
        chosen = self.choice.options if self.choice else None if self.trials else self.grid[0]
        blocked = ""
        if chosen is None and self.ended is not None:
            first = next((f" ({end.reason}: {end.message})" for end in self.ended if isinstance(end, Failure)), "")
            blocked = f"no trial of the search succeeded{first}"
        for seed in self.study.axes["seed"]:
            given = {**self.options, **(chosen or self.grid[0]), "seed": seed}  # checked before the search has chosen
            final = make_job(self.study.kind.name, given, self.study.reference_size)
            yield Planned(self.name, "final", {**self.axes, "seed": seed}, None if chosen is None else final, blocked)


def plan(campaign: Campaign, outcome: Outcomes) -> list[Planned]:
    """Every run, in the order of the file; ``ConfigError`` names the study whose options contradict one another."""
    planned: list[Planned] = []
    for name, study in campaign.studies.items():
        try:
            _require_few(len(planned) + prod(map(len, study.axes.values())))  # checked before they are made
            for group in _groups(campaign, name, outcome):
                planned += group.runs()
                _require_few(len(planned))
        except ConfigError as error:
            raise ConfigError(f"Study {name!r}: {error}") from error
    return planned


def choices(campaign: Campaign, outcome: Outcomes) -> list[tuple[str, Axes, Choice]]:
    """The choice of every finished search: study, group, choice."""
    groups = [group for name in campaign.studies for group in _groups(campaign, name, outcome)]
    return [(group.name, group.axes, group.choice) for group in groups if group.choice]


def most_further_trials(campaign: Campaign, outcome: Outcomes) -> int:
    """The most trials that searches may still add beyond the ends of their grids."""
    count = 0
    for name, study in campaign.studies.items():
        if study.search is not None:
            for group in _groups(campaign, name, outcome):
                if group.ended is None and len({trial.get(RATE) for trial in group.grid}) > 1:
                    count += max(0, study.search.beyond - len(group.trials) + len(group.grid))
    return count


def _groups(campaign: Campaign, name: str, outcome: Outcomes) -> Iterator[_Group]:
    study = campaign.studies[name]
    for axes in _products({axis: values for axis, values in study.axes.items() if axis != "seed"}):
        options: dict[str, Any] = campaign.options_of(study, axes)
        options["model"] = campaign.models[str(axes["model"])]
        method = str(axes.get("method") or options.get("method", DEFAULT_METHOD))
        group = _Group(name, study, axes, options, _products(study.search.grid(method)) if study.search else [{}])
        if study.search and len(group.grid) > 1:
            group.follow(study.search, outcome)
        yield group


def _choose(trials: list[Axes], ended: list[Ended], search: Search) -> Choice | None:
    """The trial with the best validation score, the first of equal ones; None if none has a score."""
    by_accuracy = search.select == "accuracy"
    best: tuple[tuple[float, float], Axes] | None = None
    scores: list[float | None] = []
    for trial, record in zip(trials, ended, strict=True):
        if not isinstance(record, TunedRecord):
            scores.append(None)
            continue
        if by_accuracy and not record.has("accuracy"):
            raise ConfigError("its search selects by accuracy, but the task has none. Use select: held_out_loss.")
        loss, accuracy = record.held_out_loss, record.accuracy if by_accuracy else 0.0
        scores.append(accuracy if by_accuracy else loss)
        if loss is not None and accuracy is not None and (best is None or (accuracy, -loss) > best[0]):
            best = (accuracy, -loss), trial
    if best is None:
        return None
    rate = best[1].get(RATE)
    others = [  # a trial that failed for another reason than its rate bounds nothing
        trial[RATE]
        for trial, end in zip(trials, ended, strict=True)
        if {**trial, RATE: rate} == best[1] and (not isinstance(end, Failure) or end.reason == "diverged")
    ]
    rates = [other for other in others if isinstance(other, int | float)]
    beyond = None
    if isinstance(rate, int | float) and len(rates) > 1:
        beyond = 2 * rate if rate == max(rates) else 0.5 * rate if rate == min(rates) else None
    return Choice(best[1], tuple(zip(trials, scores, strict=True)), beyond)


def _products(axes: Mapping[str, tuple[Value, ...]]) -> list[Axes]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _require_few(num_runs: int) -> None:
    if num_runs > MOST_RUNS:
        raise ConfigError(f"a campaign may have at most {MOST_RUNS:,} runs. Split it.")


@dataclass(frozen=True)
class SearchRows:
    """The numbers of rows of one task's trials, and the source of the scored ones; or why they are ``unseen`` here."""

    task: str
    studies: tuple[str, ...]
    trained: int | None = None
    scored: int | None = None
    source: str = ""
    unseen: str = ""


def search_rows(planned: Iterable[Planned], place: Place) -> list[SearchRows]:
    """The rows of every task with a search.

    Raises:
        NoRowsError: A task leaves no rows for a search; the message names task and study.
    """
    from frozencore.tune.run_rows import drawn_for_run  # imports torch, which a status does not need

    studies: dict[tuple[object, ...], list[str]] = {}
    configs: dict[tuple[object, ...], RunConfig] = {}
    for run in planned:
        if run.phase == "search" and run.job and task_of(run.job.config) is not None:
            config = place.put(run.job.config)
            which = (task_of(config), config.rows.num_train, config.rows.num_evaluation)
            configs.setdefault(which, config)
            studies.setdefault(which, []).append(run.study)
    found = []
    for key, config in configs.items():
        task, own = str(task_of(config)), tuple(dict.fromkeys(studies[key]))
        try:
            splits = drawn_for_run(config.rows, config.scoring)
            found.append(SearchRows(task, own, len(splits.train), len(splits.validation), splits.validation_from))
        except NoRowsError as error:
            raise NoRowsError(f"Study {own[0]!r} searches on task {task!r}, but has no rows for it: {error}") from error
        except DataError as error:
            found.append(SearchRows(task, own, unseen=str(error)))
    return found
