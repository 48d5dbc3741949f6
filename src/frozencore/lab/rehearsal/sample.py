"""What of a campaign a rehearsal runs: all of it but the seeds, or quickly one axis at a time.

An axis is left at a few of its values where the others are gone through: a fault that needs the eighth method on the
seventh task, and shows with neither of them elsewhere, is not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frozencore.lab.campaign.spec import MATCHED, Campaign, Study, column_key
from frozencore.lab.campaign.study_options import METHODS_OF_GRID, Value

SEEDS = 2  # the fewest that have a standard deviation
FEW = 2
MODEL_AND_SEED = ("model", "seed")
FASTER = "float32, all examples of an optimiser step at once"


@dataclass(frozen=True)
class Sample:
    """Parts of a campaign that together stand for it.

    Attributes:
        parts: Campaigns of the same name.
        left_out: What was left out or done otherwise, in words.
        is_quick: Whether runs are made faster, too.
    """

    parts: tuple[Campaign, ...]
    left_out: tuple[str, ...]
    is_quick: bool = False


def whole_sample(campaign: Campaign) -> Sample:
    """Everything, with two seeds."""
    studies = {name: _changed(study, {"seed": study.axes["seed"][:SEEDS]}) for name, study in campaign.studies.items()}
    return Sample((_with(campaign, studies),), _seeds_left_out(campaign))


def quick_sample(campaign: Campaign, seen: Sequence[Campaign] = ()) -> Sample:
    """Each study with one axis after the other: all its values, beside two of every other axis.

    Tasks that an earlier study has gone through are left at two. The first study has two seeds, the others one, and a
    search two trials.

    Args:
        seen: Campaigns rehearsed before: one that differs from any of them in its models alone is left at two values of
            every axis.
    """
    if any(_but_for_the_models(campaign) == _but_for_the_models(other) for other in seen):
        studies = {name: _few_trials(_one_axis(study, None, 1)) for name, study in campaign.studies.items()}
        few = "two values of each axis, two trials a search, one seed: another campaign differs in its models alone"
        return Sample((_with(campaign, studies),), (few, FASTER), is_quick=True)
    passed: set[Value] = set()
    long: dict[str, list[str]] = {}
    for name, study in campaign.studies.items():
        tasks = set(study.axes["task"])
        axes = [axis for axis, values in study.axes.items() if axis not in MODEL_AND_SEED and len(values) > FEW]
        long[name] = [axis for axis in axes if axis != "task" or not tasks <= passed]
        passed |= tasks
    first = next(iter(campaign.studies))
    parts = []
    for part in range(max(1, *map(len, long.values()))):
        studies = {}
        for name, study in campaign.studies.items():
            if part < max(1, len(long[name])):
                whole = long[name][part] if long[name] else None
                num_seeds = SEEDS if name == first else 1
                studies[name] = _few_trials(_one_axis(study, whole, num_seeds))
        parts.append(_with(campaign, studies))
    said = (
        *_seeds_left_out(campaign),
        "one axis at a time: all its values beside two of each other axis, tasks in the first study that has them",
        "two trials a search, one seed but in the first study",
        FASTER,
    )
    return Sample(tuple(parts), said, is_quick=True)


def _one_axis(study: Study, whole: str | None, num_seeds: int) -> Study:
    changes = {
        axis: values if axis in ("model", whole) else _few(study, axis, values)
        for axis, values in study.axes.items()
        if axis != "seed"
    }
    return _changed(study, {**changes, "seed": study.axes["seed"][:num_seeds]})


def _few(study: Study, axis: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """What the report names, or the first; and the last of the others."""
    report = study.report
    if axis == "calibration_task" and report.reference == MATCHED:
        return values  # each task is compared with its own
    named = {part for key in (report.reference, *report.differences) if key for part in (key, *key.split("/"))}
    kept = [value for value in values if column_key((value,)) in named] or [values[0]]
    others = [value for value in values if value not in kept]
    kept += others[-max(0, FEW - len(kept)) :] if len(kept) < FEW else []
    return tuple(value for value in values if value in kept)


def _few_trials(study: Study) -> Study:
    """Two trials for each method: of one option the first and the last value, of the others the last.

    Methods of one grid take its options in turn, so that every option is gone through by some method.
    """
    if study.search is None:
        return study
    methods = [str(method) for method in study.axes.get("method", ())]
    grids: list[dict[str, tuple[Value, ...]]] = []
    for grid in study.search.grids:
        own = [str(name) for name in grid.get(METHODS_OF_GRID, ())] or methods or [""]
        options = {name: values for name, values in grid.items() if name != METHODS_OF_GRID}
        several = [name for name, values in options.items() if len(values) > 1]
        for place, method in enumerate(own):
            varied = several[place % len(several)] if several else None
            few = {name: (values[0], values[-1]) if name == varied else values[-1:] for name, values in options.items()}
            grids.append(few | ({METHODS_OF_GRID: (method,)} if method else {}))
    return study.model_copy(update={"search": study.search.model_copy(update={"grids": tuple(grids)})})


def _changed(study: Study, axes: dict[str, tuple[Value, ...]]) -> Study:
    """The study with other values of its axes, in its own order."""
    return study.model_copy(update={"axes": {axis: axes.get(axis, values) for axis, values in study.axes.items()}})


def _with(campaign: Campaign, studies: dict[str, Study]) -> Campaign:
    return campaign.model_copy(update={"studies": studies})


def _seeds_left_out(campaign: Campaign) -> tuple[str, ...]:
    most = max(len(study.axes["seed"]) for study in campaign.studies.values())
    return (f"{SEEDS} of {most} seeds",) if most > SEEDS else ()


def _but_for_the_models(campaign: Campaign) -> tuple[object, ...]:
    """What decides a campaign's runs beside its models."""
    studies = [
        (
            name,
            study.kind,
            [axis for axis in study.axes.items() if axis[0] != "model"],
            study.fixed,
            study.search,
            study.reference_size,
            study.report,
        )
        for name, study in campaign.studies.items()
    ]
    return campaign.base, studies
