"""Describe the setup of a campaign from the code: data sets, options, and the inputs of constructors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from frozencore.constructors import CONSTRUCTORS
from frozencore.maths.moments import MomentName
from frozencore.tune.config import run_options
from frozencore.tune.methods import AdapterOptions, find_method, method_name
from frozencore.tune.record import TunedRecord
from frozencore.tune.task_registry import find_task
from frozencore.tune.tasks import Scoring, Split
from frozencore.tune.tasks.splits import VALIDATION_SHARE
from frozencore.tune.training.recipe import Recipe
from frozencore_lab.campaign.results import CampaignResults, StudyResults
from frozencore_lab.campaign.spec import DEFAULT_METHOD, Campaign, Study
from frozencore_lab.reports.sheet import Sheet, SheetCell, axis_name, label, number, value_name

SCORED: dict[Scoring, str] = {
    "exact_match": "greedy exact match", "choice": "likelihood of choices", "text": "held-out loss",
}  # fmt: skip
SPLITS: tuple[Split, ...] = ("train", "validation", "evaluation")
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
    axes = [study.axes for study in campaign.studies.values()]
    learned = [task for values in axes for task in values["task"]]
    others = [value for values in axes for value in values.get("calibration_task", ()) if value is not None]
    calibrated_on = [task for value in others for task in (value if isinstance(value, tuple) else (value,))]
    lines = []
    for name in dict.fromkeys(map(str, (*learned, *calibrated_on))):
        task = find_task(name)
        origin = task.source.origin
        given: dict[str, Any] = {
            option: campaign.base.get(option) or getattr(task, option) for option in SIZES.values()
        }
        texts = {
            "task": value_name("task", name),
            "data set": origin.name,
            "configuration": origin.configuration,
            f"splits: {' / '.join(SPLITS)}": " / ".join(origin.splits.get(split, "-") for split in SPLITS),
            "scoring": SCORED[task.scoring],
            "licence": task.licence,
        }
        sizes = {heading: number(given[option], 0) for heading, option in SIZES.items()}
        lines.append({heading: label(text) for heading, text in texts.items()} | sizes)
    note = (
        "Rows to train on and to evaluate on, at most: drawn by a hash of the row's id, the same for all methods and "
        "seeds. A search is scored on rows that are not trained on: unused ones of the training split, else the "
        f"validation split, else {VALIDATION_SHARE:.0%} of the training rows."
    )
    return Sheet.of("data-sets", "Data sets, fixed subsets and training length", note, lines, num_labels=6)


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
    recipe = {field.name: field.default for field in fields(Recipe)}
    note = (
        "{a, b}: chosen by the search on validation rows; a · b: varied. The same for all: AdamW with weight decay "
        f"{recipe['weight_decay']:g}, a cosine schedule after the warm-up, gradients clipped at "
        f"{recipe['max_grad_norm']:g}; cores start at zero."
    )
    return Sheet.of("hyper-parameters", "Options by study and method", note, lines, num_labels=12)


def _methods_of(campaign: Campaign, study: Study) -> list[str]:
    """The methods of a study, from its axis, its fixed options, or the default."""
    fixed = study.fixed.get("method", campaign.base.get("method", DEFAULT_METHOD))
    return [str(method) for method in study.axes.get("method", (fixed,))]


def _options(campaign: Campaign, study: Study, name: str) -> dict[str, str]:
    """The options of one method in a study, as text by heading."""
    row = find_method(study.method_of(name))
    given: Mapping[str, Any] = campaign.options_of(study, {"method": name})
    grid: Mapping[str, tuple[Any, ...]] = study.search.grid(name) if study.search else {}
    defaults = {name: option.default for name, option in run_options().items()}
    defaults |= {"learning_rate": row.learning_rate, "warmup": row.warmup}

    def values(option: str) -> tuple[Any, ...]:
        return grid.get(option) or study.axes.get(option) or (given.get(option, defaults.get(option)),)

    def text(option: str) -> str:
        shown = [value_name(option, value) for value in values(option)]
        return "{" + ", ".join(shown) + "}" if len(grid.get(option, ())) > 1 else " · ".join(shown)

    size, times = (values(option)[0] for option in ("batch_size", "accumulation"))
    batch = f"{times}, as they fit" if size == "auto" else f"{size} × {times} = {size * times}"
    reads = row.needs(AdapterOptions(rank=defaults["rank"], seed=defaults["seed"], targets=(), core={}))
    further = [option for option in dict.fromkeys((*given, *study.axes, *grid)) if option not in SHOWN_APART]
    trains = study.kind.trains
    return {
        "rank": text("rank"),
        "modules": "attention" if values("targets") == (None,) else text("targets"),
        "precision": text("dtype"),
        "batch": batch if trains else "-",
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
    counts = sorted({one.values_at_once for axes, one in ended if str(axes.get("method", one.method)) in methods})
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
