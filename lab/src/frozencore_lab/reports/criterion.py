"""Correlate what the bases capture before training with the scores after training.

The paper uses J and ‖PᵀGQ‖_F as directly observable criteria of a basis (section 3.1). A point is one configuration on
one task of one model, averaged over its seeds. Tasks have different scales, so ranks are taken within tasks. Ranks over
all points are also shown, for statistics that vary only between tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure

from frozencore.tune.figure_style import BLACK, BLUE, NAVY
from frozencore.tune.methods import METHODS, method_name
from frozencore.tune.run.record import Criterion, TunedRecord
from frozencore_lab.campaign.results import CampaignResults, FinalRun
from frozencore_lab.campaign.study_options import PLACES
from frozencore_lab.reports.canvas import MARKERS, distinct_colours, panels, shared_legend, styled
from frozencore_lab.reports.document import Drawing, Section, Table
from frozencore_lab.reports.labels import axis_name, many, value_name
from frozencore_lab.reports.rank_correlation import (
    FEWEST_POINTS,
    NUM_RANK_RESAMPLES,
    Correlation,
    rank_correlation,
)
from frozencore_lab.reports.sheet import Sheet, SheetCell, label, missing, number
from frozencore_lab.reports.tables.pivot import varied_axes

Statistic = Callable[[TunedRecord, Criterion], float | None]
STATISTICS: dict[str, Statistic] = {
    "J": lambda _, found: found.J,
    "J, share": lambda _, found: found.J_share,
    "‖PᵀGQ‖": lambda _, found: found.gradient,
    "‖PᵀGQ‖, share": lambda _, found: found.gradient_share,
    "first σ": lambda _, found: found.leading[0] if found.leading else None,
    "r-th σ": lambda _, found: found.last,
    "effective rank": lambda _, found: found.effective_rank,
    "participation": lambda _, found: found.participation,
    "spread of a": lambda _, found: found.input_spread,
    "spread of d": lambda _, found: found.error_spread,
}
"""The numbers of a criterion, by their names in a report."""
LOSS = "held-out loss"
OUTCOMES: dict[str, Statistic] = {LOSS: lambda run, _: run.held_out_loss, "accuracy": lambda run, _: run.accuracy}
NAME, TITLE, SCATTERED = "criterion", "Criterion against outcome", "‖PᵀGQ‖, share"
TOO_FEW = f"fewer than {FEWEST_POINTS} points, or one value for nearly all of them"
SEEDS_AND_PLACES = ("seed", *PLACES)


@dataclass(frozen=True)
class Point:
    """One configuration on one task.

    Attributes:
        task: The task, with the model's name if the campaign has several.
        values: The mean over the seeds of every statistic and outcome; None if a seed has none.
    """

    task: str
    method: str
    values: dict[str, float | None]


def criterion_points(final: Iterable[FinalRun]) -> list[Point]:
    """The points of final runs; a run of several studies counts once.

    Runs with bases calibrated on another task are left out, because their captures belong to that task.
    """
    found: dict[tuple[str, str], dict[str, tuple[TunedRecord, Criterion]]] = {}
    for run in final:
        record = run.record
        if not isinstance(record, TunedRecord) or record.criterion is None or run.run_id is None:
            continue
        config = record.config.content()
        if config.get("calibration_task") in (None, record.task):
            options = {name: value for name, value in config.items() if name not in SEEDS_AND_PLACES}
            key = str(run.axes["model"]), json.dumps(options, sort_keys=True, default=str)
            found.setdefault(key, {})[run.run_id] = record, record.criterion
    several, points = len({model for model, _ in found}) > 1, []
    for (model, _), runs in found.items():
        own = list(runs.values())
        task, means = value_name("task", own[0][0].task), {}
        for title, statistic in (STATISTICS | OUTCOMES).items():
            known = [value for one in own if (value := statistic(*one)) is not None]
            means[title] = fmean(known) if len(known) == len(own) else None
        points.append(Point(f"{model}, {task}" if several else task, own[0][0].method, means))
    return points


def _pairs(points: Sequence[Point], title: str, outcome: str) -> tuple[list[Point], list[float], list[float]]:
    """The points that have both values, and the values."""
    values = [(point, point.values[title], point.values[outcome]) for point in points]
    known = [(point, x, y) for point, x, y in values if x is not None and y is not None]
    return [point for point, _, _ in known], [x for _, x, _ in known], [y for _, _, y in known]


def correlate(points: Sequence[Point], title: str, outcome: str, *, within: bool = True) -> Correlation | None:
    """Correlate a statistic with an outcome, over the points that have both."""
    both, x, y = _pairs(points, title, outcome)
    tasks = list(dict.fromkeys(point.task for point in both))
    return rank_correlation(x, y, [tasks.index(point.task) for point in both], within=within)


def why_without(final: Iterable[FinalRun]) -> str:
    """The reason why no record has captures; empty if no run has bases."""
    methods = {run.record.method for run in final if isinstance(run.record, TunedRecord)}
    if not any(METHODS[method].has_bases for method in methods if method in METHODS):
        return ""
    return "no run was measured, as no method here reads the gradient G, or all sums are sketches"


def criterion_sheet(points: Sequence[Point]) -> Sheet:
    """Correlate every statistic with both outcomes, within tasks and over all points."""
    outcomes = [name for name in OUTCOMES if any(point.values[name] is not None for point in points)]
    lines = []
    for title in STATISTICS:
        line = {"statistic": label(title)}
        for outcome in outcomes:
            line[f"{outcome}, within tasks"] = _cell(correlate(points, title, outcome))
            line[f"{outcome}, over all"] = _cell(correlate(points, title, outcome, within=False))
        lines.append(line | {"points": number(sum(point.values[title] is not None for point in points), 0)})
    num_tasks = len({point.task for point in points})
    note = (
        f"Spearman's ρ with its 95 % interval ({NUM_RANK_RESAMPLES:,} draws of tasks and points) over "
        f"{many(len(points), 'configuration')} on {many(num_tasks, 'task')}, means over seeds. A criterion that tells "
        "which basis is better has ρ < 0 with the loss and ρ > 0 with the accuracy. Within tasks: the mean of the "
        "tasks' ρ, each weighted by its number of configurations minus one. Statistics are medians over the layers, "
        "except J, which is their sum, and ‖PᵀGQ‖, which is one norm over all layers."
    )
    return Sheet.of(NAME, "What the bases capture before training, and the outcome of training", note, lines)


def by_task_sheet(points: Sequence[Point], outcome: str) -> Sheet:
    """Correlate every statistic with one outcome, separately in each task."""
    tasks = {task: [point for point in points if point.task == task] for task in dict.fromkeys(p.task for p in points)}
    lines = (
        {"statistic": label(title), **{task: _cell(correlate(own, title, outcome)) for task, own in tasks.items()}}
        for title in STATISTICS
    )
    note = f"Spearman's ρ with the {outcome} over the configurations of each task, with its 95 % interval."
    return Sheet.of(f"{NAME}-{outcome.split()[-1]}", f"What the bases capture and the {outcome}, by task", note, lines)


def by_study_sheet(results: CampaignResults) -> Sheet | None:
    """Correlate every statistic with the held-out loss in each study alone, because studies vary other options."""
    lines = []
    for study in results.studies:
        points = criterion_points(study.runs)
        found = {title: correlate(points, title, LOSS) for title in STATISTICS}
        if any(found.values()):
            cells = {title: _cell(one) for title, one in found.items()}
            line = {"study": label(study.name), "varies": label(", ".join(map(axis_name, varied_axes(study))) or "-")}
            lines.append(line | cells | {"points": number(len(points), 0)})
    note = "Spearman's ρ within tasks over the configurations of each study, with its 95 % interval."
    title = "What the bases capture and the held-out loss, by study"
    return Sheet.of(f"{NAME}-by-study", title, note, lines, num_labels=2) if lines else None


def _cell(found: Correlation | None) -> SheetCell:
    if found is None:  # missing runs show in the study's own table
        return missing(TOO_FEW, is_undefined=True)
    text = f"{found.rho:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
    return SheetCell(text, value=found.rho, hint=f"{found.num_points} points")


@styled
def correlation_intervals(points: Sequence[Point]) -> Figure:
    """Draw ρ within tasks of every statistic with each outcome, with its interval."""
    figure, (axis,) = panels(1, 4.2)
    styles = {"held-out loss": (NAVY, "o", 0.14), "accuracy": (BLUE, "s", -0.14)}
    for outcome, (colour, marker, shift) in styles.items():
        for place, title in enumerate(reversed(STATISTICS)):
            found = correlate(points, title, outcome)
            if found is not None:
                axis.plot((found.low, found.high), (place + shift,) * 2, color=colour, lw=1.4)
                axis.plot(found.rho, place + shift, marker, color=colour)
        axis.plot([], [], marker, color=colour, label=f"with the {outcome}")
    axis.axvline(0, color=BLACK, lw=0.8)
    axis.set_xlim(-1.03, 1.03)
    axis.set_ylim(-0.6, len(STATISTICS) - 0.4)
    axis.set_yticks(range(len(STATISTICS)), list(reversed(STATISTICS)))
    axis.set_xlabel("Spearman's ρ within tasks, 95 % interval")
    axis.grid(axis="x")
    shared_legend(figure, [axis])
    return figure


@styled
def criterion_scatter(points: Sequence[Point]) -> Figure:
    """Draw held-out loss against the share of the gradient that reaches the core, a panel for each task."""
    tasks, methods = (list(dict.fromkeys(names)) for names in zip(*((p.task, p.method) for p in points), strict=True))
    figure, axes = panels(len(tasks), 2.6)
    colours = distinct_colours(methods)
    for axis, task in zip(axes, tasks, strict=True):
        own = [point for point in points if point.task == task]
        for i, (method, colour) in enumerate(zip(methods, colours, strict=True)):
            _, x, y = _pairs([point for point in own if point.method == method], SCATTERED, LOSS)
            axis.plot(x, y, MARKERS[i % len(MARKERS)], color=colour, alpha=0.8, mew=0, label=method_name(method))
        found = correlate(own, SCATTERED, LOSS)
        axis.set_title(task + (f", ρ = {found.rho:+.2f}" if found else ""))
        axis.locator_params(axis="x", nbins=4)
    figure.supxlabel("share of the gradient in the span, ‖PᵀGQ‖ / ‖G‖")
    figure.supylabel("held-out loss,\nnats per token")
    shared_legend(figure, axes)
    return figure


def criterion_section(results: CampaignResults) -> Section | None:
    """The section with correlations of captures with loss and accuracy; None if no run has bases.

    If no run with bases was measured, or if nothing correlates, the section gives the reason in place of tables.
    """
    runs = tuple(run for study in results.studies for run in study.runs)
    points = criterion_points(runs)
    if not points:
        why = why_without(runs)
        return Section(NAME, TITLE, f"Left out: {why}.", (), ()) if why else None
    drawings = [
        Drawing(f"{NAME}-points", f"{TITLE}: held-out loss by captured share", partial(criterion_scatter, points))
    ]
    main = criterion_sheet(points)
    if all(cell.value is None for line in main.rows for cell in line[1:-1]):
        return Section(NAME, TITLE, f"No rank correlation: {TOO_FEW}.", (), (), drawings=tuple(drawings))
    details = [by_task_sheet(points, LOSS)]
    if any(point.values["accuracy"] is not None for point in points):
        details.append(by_task_sheet(points, "accuracy"))
    if len(results.studies) > 1 and (by_study := by_study_sheet(results)) is not None:
        details.append(by_study)
    drawings.insert(0, Drawing(NAME, f"{TITLE}: correlations", partial(correlation_intervals, points)))
    return Section(NAME, TITLE, "", (), (Table(main),), tuple(map(Table, details)), tuple(drawings))
