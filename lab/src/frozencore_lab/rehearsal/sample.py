"""Sample a campaign for a rehearsal: everything except most seeds, or, if quick, each value of each axis once.

If the campaign uses 16 bits, the rehearsal does so on one task of each kind of scoring only: a processor without
16-bit arithmetic takes fifteen times as long, and a task's rows and scoring do not depend on the weights' dtype.

The quick form combines each value with one value of every other axis. It does not find a fault that needs a certain
combination of two values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from frozencore.tune.suite import find_task
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import MATCHED, Campaign, Study, column_key
from frozencore_lab.campaign.study_options import METHODS_OF_GRID, Value, Values
from frozencore_lab.rehearsal.rehearsal_rows import IN_16_BITS

SEEDS = 2  # the fewest with a standard deviation
FEW = 2
MODEL_AND_SEED = ("model", "seed")


@dataclass(frozen=True)
class Sample:
    """A smaller version of a campaign.

    Attributes:
        left_out: A description of omissions and changes.
        tasks_in_16_bits: Tasks whose runs have the campaign's dtype; all others have 32 bits.
        is_quick: Make runs faster too.
    """

    campaign: Campaign
    left_out: tuple[str, ...]
    tasks_in_16_bits: tuple[str, ...] = ()
    is_quick: bool = False


def whole_sample(campaign: Campaign) -> Sample:
    """Sample everything with two seeds, and 16 bits on one task of each kind of scoring."""
    studies = {name: _changed(study, {"seed": study.axes["seed"][:SEEDS]}) for name, study in campaign.studies.items()}
    sample = campaign.model_copy(update={"studies": studies})
    dtypes = {run.job.config.dtype for run in plan(sample, lambda _: None) if run.job}.intersection(IN_16_BITS)
    tasks = dict.fromkeys(str(task) for study in studies.values() for task in study.axes["task"])
    first = {find_task(task).scoring: task for task in reversed(tasks)}
    kept = tuple(task for task in tasks if task in first.values())
    said = (f"{', '.join(sorted(dtypes))} on {' and '.join(kept)}, float32 elsewhere",)
    return Sample(sample, (*_seeds_left_out(campaign), *(said if dtypes and len(kept) < len(tasks) else ())), kept)


def quick_sample(campaign: Campaign) -> Sample:
    """Sample two columns of each study's table, then each remaining value once, in plain tables.

    Studies that compare columns over tasks keep two tasks; the first study keeps two seeds. Searches have two trials in
    the study itself and for each task.
    """
    first = next(iter(campaign.studies))
    studies: dict[str, Study] = {}
    for name, study in campaign.studies.items():
        over_tasks = study.report.reference is not None and "task" in study.report.rows
        part = _two_columns(study, FEW if name == first or over_tasks else 1, SEEDS if name == first else 1)
        studies[name] = _few_trials(part, FEW)
    passed = {pair for study in studies.values() for pair in _pairs(study)}
    for name, study in campaign.studies.items():
        for axis, values in study.axes.items():
            lacking = tuple(value for value in values if (_key(study, axis), value) not in passed)
            if lacking and axis not in MODEL_AND_SEED:
                alone = _few_trials(_alone(study, axis, lacking), FEW if axis == "task" else 1)
                studies[f"{name}.{axis}"[:64]] = alone
                passed |= set(_pairs(alone))
    said = (
        *_seeds_left_out(campaign),
        "two columns of each table, then each value once beside one of every other axis",
        "two trials a search, one seed but in the first study",
        "float32, a layer, all examples of an optimiser step at once",
    )
    return Sample(campaign.model_copy(update={"studies": studies}), said, is_quick=True)


def _pairs(study: Study) -> Iterator[tuple[str, Value]]:
    """Each axis with each of its values. A task with a search also counts as a task."""
    for axis, values in study.axes.items():
        for key in {axis, _key(study, axis)} if axis not in MODEL_AND_SEED else ():
            yield from ((key, value) for value in values)


def _key(study: Study, axis: str) -> str:
    return f"searched {axis}" if axis == "task" and study.search is not None else axis


def _two_columns(study: Study, num_tasks: int, num_seeds: int) -> Study:
    """Keep the columns that the report names, at least two, and the first value of every other axis."""
    changes = {}
    for axis, values in study.axes.items():
        named = _named(study, axis, values)
        num = num_tasks if axis == "task" else FEW if axis in study.report.columns or named else 1
        kept = named or values[:1]
        others = [value for value in values if value not in kept]
        chosen = {*kept, *(others[-(num - len(kept)) :] if num > len(kept) else ())}
        changes[axis] = tuple(value for value in values if value in chosen)
    return _changed(study, {**changes, "model": study.axes["model"], "seed": study.axes["seed"][:num_seeds]})


def _named(study: Study, axis: str, values: Values) -> Values:
    """The values of an axis that the report names."""
    report = study.report
    if axis == "calibration_task" and report.reference == MATCHED:
        return values  # each task is compared with itself
    named = {part for key in (report.reference, *report.differences) if key for part in (key, *key.split("/"))}
    return tuple(value for value in values if column_key((value,)) in named)


def _alone(study: Study, axis: str, values: Values) -> Study:
    """Combine some values of an axis with one of every other, in a table without comparisons.

    Tasks are combined with a method that has a search, if there is one.
    """
    few = _two_columns(study, 1, 1)
    axes = {name: kept if name == "model" else kept[:1] for name, kept in few.axes.items()}
    if axis == "task" and "method" in few.axes:
        axes["method"] = (max(few.axes["method"], key=lambda method: _is_searched(study, str(method))),)
    report = study.report.model_copy(update={"reference": None, "differences": (), "figure": None})
    return _changed(study, {**axes, axis: values}).model_copy(update={"report": report})


def _is_searched(study: Study, method: str) -> bool:
    return study.search is not None and any(len(values) > 1 for values in study.search.grid(method).values())


def _few_trials(study: Study, num: int) -> Study:
    """Keep one or two trials for each method: the first and last value of one option, the last of the others.

    Methods of one grid vary its options in turn, so that some method varies each option. A search adds at most one
    trial beyond an end of its grid.
    """
    if study.search is None:
        return study
    grids: list[dict[str, tuple[Value, ...]]] = []
    for grid in study.search.grids:
        own = [str(name) for name in grid.get(METHODS_OF_GRID, study.axes.get("method", ()))] or [""]
        options = {name: values for name, values in grid.items() if name != METHODS_OF_GRID}
        several = [name for name, values in options.items() if len(values) > 1]
        for place, method in enumerate(own):
            varied = several[place % len(several)] if several and num > 1 else None
            few = {name: (values[0], values[-1]) if name == varied else values[-1:] for name, values in options.items()}
            grids.append(few | ({METHODS_OF_GRID: (method,)} if method else {}))
    search = study.search.model_copy(update={"grids": tuple(grids), "beyond": min(study.search.beyond, 1)})
    return study.model_copy(update={"search": search})


def _changed(study: Study, axes: dict[str, tuple[Value, ...]]) -> Study:
    """The study with other values of its axes, in its own order, and with the remaining variants."""
    kept = {axis: axes.get(axis, values) for axis, values in study.axes.items()}
    variants = {name: options for name, options in study.variants.items() if name in kept["method"]}
    return study.model_copy(update={"axes": kept, "variants": variants})


def _seeds_left_out(campaign: Campaign) -> tuple[str, ...]:
    most = max(len(study.axes["seed"]) for study in campaign.studies.values())
    return (f"{SEEDS} of {most} seeds",) if most > SEEDS else ()
