"""What the bases captured before training beside what came of it: is the criterion worth anything?

The paper takes J and ‖PᵀGQ‖_F as directly observable criteria of a basis (section 3.1). A point is one configuration on
one task of one model: the means over its seeds. Values of different tasks lie on different scales, so ranks are taken
within tasks; over all points they are taken too, for what varies between tasks alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from frozencore.tune.methods import METHODS
from frozencore.tune.run.record import TunedRecord
from frozencore.tune.run.record_of_bases import Criterion
from frozencore_lab.campaign.results import CampaignResults, FinalRun, StudyResults
from frozencore_lab.campaign.study_options import PLACES
from frozencore_lab.reports.labels import axis_name, value_name
from frozencore_lab.reports.sheets.sheet import Sheet, SheetCell, label, many, number
from frozencore_lab.reports.statistics.rank_correlation import (
    FEWEST_POINTS,
    NUM_RANK_RESAMPLES,
    Correlation,
    rank_correlation,
)


@dataclass(frozen=True)
class Statistic:
    """One number of a criterion, as a report calls it."""

    title: str
    of: Callable[[Criterion], float | None]


STATISTICS = (
    Statistic("J", lambda found: found.J),
    Statistic("J, share", lambda found: found.J_share),
    Statistic("‖PᵀGQ‖", lambda found: found.gradient),
    Statistic("‖PᵀGQ‖, share", lambda found: found.gradient_share),
    Statistic("first σ", lambda found: found.leading[0] if found.leading else None),
    Statistic("r-th σ", lambda found: found.last),
    Statistic("effective rank", lambda found: found.effective_rank),
    Statistic("participation", lambda found: found.participation),
    Statistic("spread of a", lambda found: found.input_spread),
    Statistic("spread of d", lambda found: found.error_spread),
)
OUTCOMES = ("held-out loss", "accuracy")
SEEDS_AND_PLACES = ("seed", *PLACES)


@dataclass(frozen=True)
class Point:
    """One configuration on one task.

    Attributes:
        task: With the model's name where the campaign has several.
        values: By title of the statistic.
        outcomes: By name; None where a seed has none.
    """

    task: str
    method: str
    values: dict[str, float | None]
    outcomes: dict[str, float | None]


def criterion_points(final: Iterable[FinalRun]) -> list[Point]:
    """The points of some final runs; a run that several studies ask for counts once.

    Runs whose bases were calibrated on another task are left out: what they capture is of that task.
    """
    runs: dict[tuple[str, str], dict[str, TunedRecord]] = {}
    tasks: dict[tuple[str, str], str] = {}
    for run in final:
        record = run.record
        if not isinstance(record, TunedRecord) or record.criterion is None or run.run_id is None:
            continue
        config = record.config.content()
        if config.get("calibration_task") in (None, record.task):
            options = {name: value for name, value in config.items() if name not in SEEDS_AND_PLACES}
            key = str(run.axes["model"]), json.dumps(options, sort_keys=True, default=str)
            runs.setdefault(key, {})[run.run_id] = record
            tasks[key] = value_name("task", record.task)
    several = len({model for model, _ in runs}) > 1
    return [
        _point(f"{key[0]}, {tasks[key]}" if several else tasks[key], list(own.values())) for key, own in runs.items()
    ]


def _point(task: str, records: Sequence[TunedRecord]) -> Point:
    found = [record.criterion for record in records if record.criterion is not None]
    return Point(
        task,
        records[0].method,
        {one.title: _mean(one.of(criterion) for criterion in found) for one in STATISTICS},
        {
            "held-out loss": _mean(record.held_out_loss for record in records),
            "accuracy": _mean(record.accuracy for record in records),
        },
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else None


def correlate(points: Sequence[Point], title: str, outcome: str, *, within: bool = True) -> Correlation | None:
    """A statistic of the points with an outcome, over those that have both."""
    both = [
        (point.task, value, came)
        for point in points
        if (value := point.values[title]) is not None and (came := point.outcomes[outcome]) is not None
    ]
    tasks = list(dict.fromkeys(task for task, _, _ in both))
    return rank_correlation(
        [value for _, value, _ in both], [came for _, _, came in both], [tasks.index(task) for task, _, _ in both],
        within=within,
    )  # fmt: skip


def why_without(final: Iterable[FinalRun]) -> str:
    """Why no record says what the bases of its run capture; nothing where no run has bases."""
    records = [run.record for run in final if isinstance(run.record, TunedRecord)]
    with_bases = [record for record in records if record.method in METHODS and METHODS[record.method].has_bases]
    if not with_bases:
        return ""
    return "no run was measured, as no method here reads the gradient G, or all sums are sketches"


def criterion_sheet(points: Sequence[Point]) -> Sheet:
    """Every statistic with both outcomes, within the tasks and over all points."""
    outcomes = [name for name in OUTCOMES if any(point.outcomes[name] is not None for point in points)]
    rows = [
        (
            label(statistic.title),
            *(
                _cell(correlate(points, statistic.title, outcome, within=within))
                for outcome in outcomes
                for within in (True, False)
            ),
            number(sum(point.values[statistic.title] is not None for point in points), 0),
        )
        for statistic in STATISTICS
    ]
    headings = [f"{outcome}, {where}" for outcome in outcomes for where in ("within tasks", "over all")]
    num_tasks = len({point.task for point in points})
    return Sheet(
        "criterion",
        "What the bases capture before training, and what comes of it",
        f"Spearman's ρ with its 95 % interval ({NUM_RANK_RESAMPLES:,} draws of tasks and points) over "
        f"{many(len(points), 'configuration')} on {many(num_tasks, 'task')}, means over seeds. A criterion that tells "
        "which basis is worth more has ρ < 0 with the loss and ρ > 0 with the accuracy. Within tasks is the mean of "
        "the tasks' ρ, weighted by their configurations less one. Statistics are medians over the layers, but for J "
        "and ‖PᵀGQ‖.",
        ("statistic", *headings, "points"),
        tuple(rows),
    )


def by_task_sheet(points: Sequence[Point], outcome: str, suffix: str) -> Sheet:
    """Every statistic with one outcome, in each task alone."""
    tasks: dict[str, list[Point]] = {}
    for point in points:
        tasks.setdefault(point.task, []).append(point)
    rows = [
        (label(statistic.title), *(_cell(correlate(own, statistic.title, outcome)) for own in tasks.values()))
        for statistic in STATISTICS
    ]
    note = f"Spearman's ρ with the {outcome} over the configurations of each task, with its 95 % interval."
    return Sheet(
        f"criterion{suffix}", f"What the bases capture and the {outcome}, by task", note, ("statistic", *tasks),
        tuple(rows),
    )  # fmt: skip


def by_study_sheet(results: CampaignResults) -> Sheet:
    """Every statistic with the held-out loss in each study alone: what is varied differs from study to study."""
    rows = []
    for study in results.studies:
        points = criterion_points(study.runs)
        found = [correlate(points, statistic.title, "held-out loss") for statistic in STATISTICS]
        if any(found):
            rows.append((label(study.name), label(_varied(study)), *map(_cell, found), number(len(points), 0)))
    return Sheet(
        "criterion-by-study",
        "What the bases capture and the held-out loss, by study",
        "Spearman's ρ within tasks over the configurations of each study, with its 95 % interval.",
        ("study", "varies", *(statistic.title for statistic in STATISTICS), "points"),
        tuple(rows),
        num_labels=2,
    )


def _varied(study: StudyResults) -> str:
    several = [axis for axis, values in study.study.axes.items() if len(values) > 1]
    return ", ".join(axis_name(axis) for axis in several if axis not in ("model", "task", "seed")) or "-"


def _cell(found: Correlation | None) -> SheetCell:
    if found is None:
        why = f"fewer than {FEWEST_POINTS} points, or one value for nearly all of them"
        return SheetCell("n/a", hint=why, is_undefined=True)  # a run that is missing is missed in its own table
    text = f"{found.rho:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
    return SheetCell(text, value=found.rho, hint=f"{found.num_points} points")
