"""Describe the setup of a campaign from the code: data sets, options, and the inputs of constructors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from functools import partial
from itertools import product
from typing import Any

from frozencore.constructors import CONSTRUCTORS
from frozencore.maths.moments import MomentName
from frozencore.tune.config import run_options
from frozencore.tune.methods import Method, MethodConfig, find_method
from frozencore.tune.record import TunedRecord
from frozencore.tune.rows.sources import Scoring
from frozencore.tune.rows.splits import VALIDATION_SHARE
from frozencore.tune.training.recipe import MAX_GRAD_NORM, WEIGHT_DECAY
from frozencore_lab.campaign.job import default_learning_rate
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import DEFAULT_METHOD, Campaign, Study
from frozencore_lab.reports.sheet import Sheet, SheetCell, axis_name, label, method_name, number, value_name
from frozencore_lab.tasks.registry import find_task
from frozencore_lab.tasks.task import Split

SCORED: dict[Scoring, str] = {
    "exact_match": "greedy exact match", "choice": "likelihood of choices", "text": "held-out loss",
}  # fmt: skip
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")
VARIED = " · "  # between the values of an axis
SIZES = {"train": "num_train", "evaluation": "num_evaluation", "epochs": "epochs"}
LETTERS: dict[MomentName, str] = {
    "cross": "G", "input_square": "a", "error_square": "d", "input_outer": "A", "error_outer": "D",
    "output_outer": "E[yyᵀ]", "input_total": "E[x]", "output_total": "E[y]",
}  # fmt: skip
INPUT: frozenset[MomentName] = frozenset({"input_square", "input_outer"})
OUTPUT: frozenset[MomentName] = frozenset({"error_square", "error_outer", "output_outer"})
SHOWN_APART = (
    "model", "task", "method", "seed", "rank", "targets", "dtype", "batch_size", "accumulation",
    "learning_rate", "warmup", "calibration_size",
)  # fmt: skip
"""Options with their own column here or in another table."""


def data_sheet(campaign: Campaign) -> Sheet:
    """A line for each task of any study: the source, number and scoring of its rows (paper, table "datasets")."""
    sizes: dict[str, dict[str, set[Any]]] = {}
    for study in campaign.studies.values():
        for method in _methods_of(campaign, study):
            values = partial(_values, campaign, study, method)
            for learned in map(str, values("task")):
                for heading, option in SIZES.items():
                    given = {value or getattr(find_task(learned), option) for value in values(option)}
                    sizes.setdefault(learned, {}).setdefault(heading, set()).update(given)
            for value in (*values("calibration_task"), *values("forgetting")):
                for other in value if isinstance(value, tuple) else (value,):
                    if other is not None:
                        sizes.setdefault(str(other), {})
    lines = []
    for name, by_heading in sizes.items():
        task = find_task(name)
        origin = task.source.origin
        texts = {
            "task": value_name("task", name),
            "data set": origin.name,
            "configuration": origin.configuration,
            f"splits: {' / '.join(SPLITS)}": " / ".join(origin.splits.get(split, "-") for split in SPLITS),
            "scoring": SCORED[task.scoring],
            "licence": task.licence,
        }
        lines.append(
            {heading: label(text) for heading, text in texts.items()}
            | {heading: _several(by_heading.get(heading, set())) for heading in SIZES}
        )
    note = (
        "Rows to train on and to evaluate on, at most: drawn by a hash of the row's id, the same for all methods and, "
        "without rows_by_seed, for all seeds. A search is scored on rows that are not trained on: unused ones of the "
        f"training split, else the validation split, else {VALIDATION_SHARE:.0%} of the training rows. A task without "
        "numbers is calibrated on, or its texts show what is forgotten."
    )
    return Sheet.of("data-sets", "Data sets, fixed subsets and training length", note, lines, num_labels=6)


def _several(counts: Set[int]) -> SheetCell:
    """The number that all studies have, or each of several."""
    if len(counts) == 1:
        return number(next(iter(counts)), 0)
    return label(VARIED.join(f"{count:,}" for count in sorted(counts)) or "-")


def hyper_parameter_sheet(results: CampaignResults) -> Sheet:
    """A line for each study and set of methods with the same options: fixed, varied, or chosen by the search (paper,
    table "hyperparams")."""
    lines = []
    for study in results.studies:
        by_options: dict[tuple[str, ...], list[str]] = {}
        for method in _methods_of(results.campaign, study.study):
            texts = _options(results.campaign, study.study, method)
            by_options.setdefault(tuple(texts.values()), []).append(method)
        for own, methods in by_options.items():
            names = ", ".join(value_name("method", method) for method in methods)
            shown = {"study": study.name, "methods": names, **dict(zip(texts, own, strict=True))}
            cells = {heading: label(text) for heading, text in shown.items()}
            lines.append(cells | {"values": _trained(study, methods)})
    note = (
        "{a, b}: chosen by the search on validation rows; a · b: varied. The same for all: AdamW with weight decay "
        f"{WEIGHT_DECAY:g}, a cosine schedule after the warm-up, gradients clipped at {MAX_GRAD_NORM:g}; cores start "
        "at zero."
    )
    return Sheet.of("hyper-parameters", "Options by study and method", note, lines, num_labels=12)


def _methods_of(campaign: Campaign, study: Study) -> list[str]:
    """The methods of a study, from its axis, its fixed options, or the default."""
    fixed = study.fixed.get("method", campaign.base.get("method", DEFAULT_METHOD))
    return [str(method) for method in study.axes.get("method", (fixed,))]


def _values(campaign: Campaign, study: Study, method: str, option: str) -> tuple[Any, ...]:
    """The values of an option over a study's runs of one method: of its grid, of an axis, or the one value given."""
    grid: Mapping[str, tuple[Any, ...]] = study.search.grid(method) if study.search else {}
    given = campaign.options_of(study, {"method": method})
    return (
        grid.get(option)
        or study.axes.get(option)
        or (given.get(option, _defaults(find_method(study.method_of(method))).get(option)),)
    )


def _defaults(row: Method) -> dict[str, Any]:
    """The default of every option for a method."""
    defaults = {name: option.default for name, option in run_options().items()}
    return {**defaults, "learning_rate": default_learning_rate(row), "warmup": row.warmup}


def _options(campaign: Campaign, study: Study, name: str) -> dict[str, str]:
    """The options of one method in a study, as text by heading."""
    row = find_method(study.method_of(name))
    given: Mapping[str, Any] = campaign.options_of(study, {"method": name})
    grid: Mapping[str, tuple[Any, ...]] = study.search.grid(name) if study.search else {}
    values = partial(_values, campaign, study, name)

    def text(option: str) -> str:
        shown = [value_name(option, value) for value in values(option)]
        return "{" + ", ".join(shown) + "}" if len(grid.get(option, ())) > 1 else VARIED.join(shown)

    batches = [
        f"{times}, as they fit" if size == "auto" else f"{size} × {times} = {size * times}"
        for size, times in product(values("batch_size"), values("accumulation"))
    ]
    reads = row.needs(MethodConfig())
    further = [option for option in dict.fromkeys((*given, *study.axes, *grid)) if option not in SHOWN_APART]
    trains = study.kind.trains
    return {
        "rank": text("rank"),
        "modules": "attention" if values("targets") == (None,) else text("targets"),
        "precision": text("dtype"),
        "batch": VARIED.join(batches) if trains else "-",
        "learning rate": text("learning_rate") if trains else "-",
        "warm-up": text("warmup") if trains else "-",
        "calibration": text("calibration_size") if reads else "reads none",
        "further": "; ".join(f"{axis_name(option)} {text(option)}" for option in further) or "-",
        "selection": _selection(study, grid),
        "seeds": ", ".join(value_name("seed", seed) for seed in study.axes["seed"]),
    }


def _selection(study: Study, grid: Mapping[str, tuple[Any, ...]]) -> str:
    search, trials = study.search, math.prod(map(len, grid.values()))
    if not search or trials < 2:
        return "none"
    goes_on = search.beyond and len(grid.get("learning_rate", ())) > 1
    further = f" and up to {search.beyond} beyond" if goes_on else ""
    return f"{trials} trials{further} by {axis_name(search.select)}, seed {search.seed}"


def _trained(study: StudyResults, methods: list[str]) -> SheetCell:
    """A cell with the number of values that these methods train, from the records."""
    ended = [(run.axes, run.record) for run in study.runs if isinstance(run.record, TunedRecord)]
    counts = sorted({one.num_trainable for axes, one in ended if str(axes.get("method", one.method)) in methods})
    if not counts:
        return SheetCell("-", hint="nothing was trained", is_undefined=True)
    return SheetCell(f"{counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else ""), value=counts[0])


def information_sheet(campaign: Campaign) -> Sheet | None:
    """A line for each constructor with what it reads (paper, table "basis-signals"); None if there is none."""
    named = [study.method_of(name) for study in campaign.studies.values() for name in _methods_of(campaign, study)]
    lines = []
    for name in (name for name in dict.fromkeys(named) if name in CONSTRUCTORS):
        row = CONSTRUCTORS[name]
        needs = row.needs(row.options(coordinates="qr"))  # for the spans; Fisher coordinates read a and d too
        if needs:
            sides = [side for side, moments in (("input", INPUT), ("output", OUTPUT)) if needs & moments]
            read = ", ".join(letter for moment, letter in LETTERS.items() if moment in needs)
            texts = "yes" if "cross" in needs else "indirect", " and ".join(sides) or "no", read
        else:
            texts = ("no", "weight", "spectrum of W") if row.weights_only else ("no", "no", "random draw")
        shown = zip(("constructor", "task signal", "geometry", "source"), (method_name(name), *texts), strict=True)
        lines.append({heading: label(text) for heading, text in shown})
    note = "Task signal: the signed pairing of inputs and output errors, G. Indirect: the data are seen without it."
    return Sheet.of("constructors", "What the constructors look at", note, lines, num_labels=4) if lines else None
