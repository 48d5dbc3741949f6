"""The quality of methods on a real model: the table and the figure of the campaign on SmolLM2, from its records.

Each cell is a mean over seeds with the standard deviation. The differences from FCCA, of the held-out losses and of the
rises of other losses, are taken seed by seed, with the 95 % interval of Student's t.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import matplotlib.pyplot as plt
from scipy.stats import t

from frozencore.constructors import CONSTRUCTORS
from harness import ROOT, lines_of, table

METHODS = ("smollm2", "smollm2-rest", "smollm2-more", "smollm2-hellaswag")
ABLATIONS = ("smollm2-ablations", "smollm2-ablations-rest", "smollm2-checks")
TASKS = {
    "sst2": "SST-2", "cola": "CoLA", "svamp-operation": "SVAMP's operation", "hellaswag": "HellaSwag",
    "hellaswag-activity": "HellaSwag's activity",
}  # fmt: skip
NAMES = {
    "fcca": "FCCA", "rawgrad": "RawGrad", "signgrad": "SignGrad", "filora": "FiLoRA", "eva": "EVA", "milora": "MiLoRA",
    "lora_xs": "LoRA-XS", "vera": "VeRA's bases", "random": "Random", "lora": "LoRA", "dora": "DoRA",
    "pissa": "PiSSA", "full": "full fine-tuning",
}  # fmt: skip
DEFAULTS = {
    "whiten": "both", "damping": 1e-3, "coordinates": "fisher", "rank": 16, "alpha": "auto", "targets": None,
    "fisher": "diagonal", "shrinkage": 0.0, "fisher_labels": "empirical", "calibration_task": None,
    "calibration_size": 128, "dtype": "auto",
}  # fmt: skip
"""What the ablations change, in the order of their lines, and FCCA's defaults."""
MEASURES = {"accuracy": (1, 100.0), "held_out_loss": (3, 1.0)}
REFERENCE = "FCCA"
HEADINGS = (
    "method", "learning rate", "values", "state held while training", "accuracy, %", "held-out loss", "minus FCCA's",
    "rise on other texts", "rise minus FCCA's",
)  # fmt: skip
Record = Mapping[str, Any]


def read_finals() -> dict[str, dict[str, list[Record]]]:
    """The final runs by task and by name of the method, each in the order of its seeds."""
    found: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records_of(METHODS):
        if record["config"].get("evaluate_on") != "validation":
            found[record["task"]][named(record)].append(record)
    for methods in found.values():
        for runs in methods.values():
            runs.sort(key=lambda record: record["seed"])
    return found


def records_of(campaigns: Iterable[str]) -> Iterable[Record]:
    """The records of several campaigns; a run that several have stands once."""
    results = ROOT / "lab" / "results"
    return {
        record["run_id"]: record for name in campaigns for record in lines_of(results / name / "records.jsonl")
    }.values()


def named(record: Record) -> str:
    """The method as a table names it: of LoRA with its rank and its layers, in rounds with their number."""
    config, name = record["config"], NAMES[record["method"]]
    if record["method"] in ("lora", "dora", "pissa"):
        name += f", r = {config.get('rank', 16)}"
    if config.get("targets") == "all-linear":
        name += ", all linear layers"
    rounds = config.get("refresh", 1)
    return name if rounds == 1 else f"{name}, {rounds} rounds"


def spread(values: Sequence[float], digits: int, times: float = 1.0) -> str:
    """The mean and the standard deviation."""
    return f"{times * mean(values):.{digits}f} ± {times * stdev(values):.{digits}f}"


def half_interval(values: Sequence[float], least: float = 0.0) -> float:
    """Half of the 95 % interval of a mean by Student's t; ``least`` is a bound below for the standard deviation."""
    return float(t.ppf(0.975, len(values) - 1)) * max(stdev(values), least) / math.sqrt(len(values))


def held_out_loss(record: Record) -> float:
    return record["held_out_loss"]


def difference(
    runs: Sequence[Record], reference: Sequence[Record], value: Callable[[Record], float] = held_out_loss
) -> str:
    """The mean difference of a value, seed by seed, with its 95 % interval."""
    found = [value(one) - value(other) for one, other in zip(runs, reference, strict=True)]
    return f"{mean(found):+.3f} ± {half_interval(found):.3f}"


def risen(record: Record) -> float:
    """Nats a token by which the loss on the texts of other tasks rose, the mean over these tasks."""
    return mean(other["loss"] - other["loss_before"] for other in record["forgetting"].values())


def by_loss(methods: Mapping[str, list[Record]]) -> list[tuple[str, list[Record]]]:
    """The methods, the lowest mean loss first."""
    return sorted(methods.items(), key=lambda item: mean(record["held_out_loss"] for record in item[1]))


def of_task(methods: Mapping[str, list[Record]]) -> str:
    """A task's table: the base model, then the methods by their mean loss."""
    some = next(iter(methods.values()))[0]
    before = [f"{100 * some['accuracy_before']:.1f}", f"{some['held_out_loss_before']:.3f}"]
    rows = [row(name, runs, methods[REFERENCE]) for name, runs in by_loss(methods)]
    return table(HEADINGS, [["base model", "", "", "", *before, "", "", ""], *rows])


def row(name: str, runs: Sequence[Record], reference: Sequence[Record]) -> list[str]:
    rates = {run["resolved"]["recipe"]["learning_rate"] for run in runs}
    return [
        name,
        ", ".join(f"{rate:g}" for rate in sorted(rates)),
        f"{runs[0]['values_at_once']:,}",
        f"{median(run['state_held_bytes'] for run in runs) / 1000:,.0f} KB",
        spread([run["accuracy"] for run in runs], 1, 100),
        spread([run["held_out_loss"] for run in runs], 3),
        "" if name == REFERENCE else difference(runs, reference),
        spread([risen(run) for run in runs], 2),
        "" if name == REFERENCE else difference(runs, reference, risen),
    ]


def ablations() -> str:
    """FCCA with one option changed: losses beside those of the default, a line a change."""
    found: dict[tuple[tuple[str, str], ...], list[Record]] = defaultdict(list)
    trained = [record for record in records_of(ABLATIONS) if record.get("task") == "sst2"]
    for record in sorted(trained, key=lambda record: record["seed"]):
        config = record["config"]
        options = {**config, **config["core"], **config["calibration"]}
        changes = [(name, _shown(options[name])) for name in DEFAULTS if options[name] != DEFAULTS[name]]
        found[tuple(changes)].append(record)
    default = found.pop(())
    names = list(DEFAULTS)
    changed = sorted(
        found.items(), key=lambda each: [(names.index(name), len(value), value) for name, value in each[0]]
    )
    rows = []
    for changes, runs in [((("", "default"),), default), *changed]:
        cells = [spread([record[name] for record in runs], *how) for name, how in MEASURES.items()]
        what = ", ".join(f"{name} {value}".strip() for name, value in changes).replace("alpha none", "scale 1")
        rows.append(
            [what, f"{runs[0]['values_at_once']:,}", *cells, "" if runs is default else difference(runs, default)]
        )
    return table(["changed", "values", "accuracy, %", "held-out loss", "minus the default's"], rows)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "/".join(name.removesuffix("_proj") for name in value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def stability() -> str:
    """Mean cosines of the principal angles between bases of few and of many calibration rows, by the number of few."""
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records_of(ABLATIONS):
        if "cosine_Q" in record:
            found[record["num_calibration"]["basis"]].append(record)
    rows = [
        [str(size), *(spread([record[f"cosine_{side}"] for record in runs], 3) for side in "PQ")]
        for size, runs in sorted(found.items())
    ]
    return table(["calibration rows", "P", "Q"], rows)


def blocks() -> dict[str, str]:
    """The table of each task, and those of the ablations, by the name of the block."""
    tasks = {f"smollm2-{task}": of_task(methods) for task, methods in read_finals().items()}
    return {**tasks, "smollm2-ablations": ablations(), "smollm2-stability": stability()}


def figure(file: Path) -> None:
    """Held-out loss and what was forgotten, by method, the lowest mean loss first; a row of panels a task."""
    tasks = read_finals()
    heights = [1 + 0.2 * len(methods) for methods in tasks.values()]
    drawn, rows = plt.subplots(
        len(tasks), 2, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for (left, right), (task, methods) in zip(rows, tasks.items(), strict=True):
        ordered = by_loss(methods)
        draw(left, ordered, held_out_loss)
        draw(right, ordered, risen)
        left.set_yticks(range(len(ordered)), [f"{name} ({runs[0]['values_at_once']:,})" for name, runs in ordered])
        right.set_yticks(range(len(ordered)), [""] * len(ordered))
        left.set_xlabel(f"held-out loss on {TASKS[task]}, nats per token")
        right.set_xlabel("rise on other texts, nats per token")
    drawn.suptitle(
        "SmolLM2-135M-Instruct: a dot a seed, a bar the mean; in brackets the values that train", fontsize=10
    )
    drawn.savefig(file, dpi=160)
    plt.close(drawn)


def draw(panel: Any, methods: Iterable[tuple[str, list[Record]]], value: Callable[[Record], float]) -> None:
    """A panel: a line a method, cores in one colour and the others in another."""
    for place, (_, runs) in enumerate(methods):
        found = [value(run) for run in runs]
        colour = "tab:blue" if runs[0]["method"] in CONSTRUCTORS else "tab:orange"
        panel.plot(found, [place] * len(found), "o", color=colour, alpha=0.6)
        panel.plot([mean(found)], [place], "|", color=colour, markersize=18, markeredgewidth=2)
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.3)
