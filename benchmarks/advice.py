"""Is `frozencore advise` right?  Compare its advice on constructors with the trained losses of committed campaigns.

    nice python benchmarks/advice.py --data-root DIR --model DIR      # minutes;  --only TASK: one of the seven tasks
    python benchmarks/advice.py --quick --out FILE                    # a few rows, which only shows that it runs

``--model`` is ``tiny1m``, whose outcomes are in lab/results/tiny1m-text; the pocket model is in the package, and its
outcomes are in lab/results/pocket. An outcome is the held-out loss of a constructor at its best searched setting, the
mean of three seeds. FCCA's damping and sides are compared with those of lab/results/pocket-ablations. Rank correlations
are taken within tasks, with a bootstrap interval over tasks and constructors.

Times are seconds of CPU of one thread, the median of three rounds, over those of a plain forward and backward pass over
the same rows, with and without gradients of the weights. Tasks that are in ``--out`` already are not advised on again;
what they are compared with is read again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

import torch

from frozencore.advice.advice_run import advice_record, advise_run
from frozencore.constructors import CONSTRUCTORS
from frozencore.files.whole_file import write_json
from frozencore.tune.figure_style import method_colour, plt, save_figure
from frozencore.tune.methods import METHODS, bases_name
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.config import RunConfig, make_config
from frozencore.tune.run.prepare import PreparedRun, calibration_batches, prepare
from frozencore.tune.run.provenance import provenance
from frozencore_lab.reports.rank_correlation import rank_correlation
from harness import cpu_s, lines_of, load_average

RESULTS = Path(__file__).parents[1] / "lab" / "results"
TASKS = {
    "hellaswag-text": "tiny1m-text", "gsm8k-text": "tiny1m-text", "sst2-text": "tiny1m-text",
    "pocket-math": "pocket", "pocket-sentiment": "pocket", "pocket-entailment": "pocket", "pocket-comparison": "pocket",
}  # fmt: skip
TRAINED_ALIKE = {"rank": 16, "targets": None, "learning_rate": 5e-3, "calibration_size": 128, "calibration_task": None}
ROUNDS = 3
Row = dict[str, Any]


def configuration(task: str, model: str | None, data_root: Path | None) -> RunConfig:
    """The configuration of the campaign's runs."""
    if TASKS[task] == "pocket":
        return make_config(model=str(pocket_model_path()), task=task, dtype="float32", device="cpu")
    return make_config(model=model, task=task, data_root=data_root, truncate=True, max_length=128, device="cpu")


def advised(task: str, config: RunConfig, rounds: int) -> Row:
    """Advise on a task's settings, and measure the time."""
    prepared = prepare(config, lambda *_: None)
    batches = calibration_batches(prepared.rows, prepared.encoder.pad_id)
    taken, plain = [], {True: [], False: []}
    for _ in range(rounds):  # one after the other: a machine that is loaded slows all of them
        for of_weights, seconds in plain.items():
            seconds.append(cpu_s(partial(plain_pass, prepared, batches, of_weights)))
        prepared.model.requires_grad_(True)
        started = time.process_time()
        advice = advise_run(config, prepared, lambda *_: None)
        taken.append(time.process_time() - started)
    record = advice_record(config, prepared, advice)
    return {
        "task": task,
        "campaign": TASKS[task],
        "gains": {
            bases_name(worth.setting.method, worth.setting.options): round(worth.gain, 5) for worth in advice.bases
        },
        "bases": bases_name(advice.best_bases.setting.method, advice.best_bases.setting.options),
        "over_training_pass": round(median(taken) / median(plain[True]), 2),
        "over_calibration_pass": round(median(taken) / median(plain[False]), 2),
        **{name: record[name] for name in ("recommended", "base_loss", "length", "spreads", "num_agreed", "passes")},
        "bought": record["bought"],
        "shapes": [{name: own[name] for name in ("method", "on", "rank_budget", "gain")} for own in record["shapes"]],
    }  # fmt: skip


def plain_pass(prepared: PreparedRun, batches: Iterable[Any], of_weights: bool) -> None:
    """The model's own loss, forward and backward."""
    prepared.model.requires_grad_(of_weights)
    for batch in batches:
        embeds = prepared.model.get_input_embeddings()(batch["input_ids"])
        inputs = embeds if of_weights else embeds.requires_grad_()
        prepared.model(
            inputs_embeds=inputs, attention_mask=batch["attention_mask"], labels=batch["labels"]
        ).loss.backward()
        prepared.model.zero_grad()


def trained_losses(campaign: str, task: str, **where: Any) -> dict[str, float]:
    """Held-out losses by setting: means over seeds, the best of what was searched; see :func:`trained_seeds`."""
    return {name: fmean(found) for name, found in trained_seeds(campaign, task, **where).items()}


def trained_seeds(campaign: str, task: str, **where: Any) -> dict[str, list[float]]:
    """Held-out losses by setting, those of each seed, with the best of what was searched.

    Args:
        where: What a run's configuration must have.
    """
    losses: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in lines_of(RESULTS / campaign / "records.jsonl"):
        config = record["config"]
        core = config["core"]
        if record.get("task") != task or config["evaluate_on"] != "evaluation" or record["method"] not in CONSTRUCTORS:
            continue
        if any(config.get(name) != value for name, value in where.items()) or core["coordinates"] != "qr":
            continue
        options = {
            name: core[name]
            for name in ("damping", "whiten")
            if core[name] != {"damping": 1e-3, "whiten": "both"}[name]
        }
        name = ", ".join([METHODS[record["method"]].label, *(f"{key} {value}" for key, value in options.items())])
        if core["fisher"] == "diagonal":
            searched = json.dumps([config[key] for key in ("learning_rate", "warmup", "calibration_size")])
            losses[name, searched].append(record["held_out_loss"])
    best: dict[str, list[float]] = {}
    for (name, _), found in losses.items():
        best[name] = min(best.get(name, found), found, key=fmean)
    return best


def against_the_best(row: Row) -> Row | None:
    """The recommended bases and the best constructor, trained: means, and their difference with its standard error.

    None where no committed run has trained those bases.
    """
    constructors = trained_seeds(row["campaign"], row["task"], rank=16, targets=None)
    if row["bases"] not in constructors:
        return None
    labels = {METHODS[name].label for name in CONSTRUCTORS}
    best = min((name for name in constructors if name in labels), key=lambda name: fmean(constructors[name]))
    return {
        "bases": row["bases"],
        "loss": round(fmean(constructors[row["bases"]]), 4),
        "best": best,
        **difference(constructors[row["bases"]], constructors[best]),
    }


def difference(ours: list[float], theirs: list[float]) -> Row:
    """The difference of means over seeds, with its standard error."""
    error = (variance(ours) / len(ours) + variance(theirs) / len(theirs)) ** 0.5
    return {
        "difference": round(fmean(ours) - fmean(theirs), 4),
        "standard_error": round(error, 4),
        "seeds": len(ours),
    }


def correlated(rows: list[Row], trained: dict[str, dict[str, float]]) -> Row | None:
    """Over all tasks together, and of each by itself."""
    points = [
        (row["gains"][name], -loss, number)
        for number, row in enumerate(rows)
        for name, loss in trained.get(row["task"], {}).items()
        if name in row["gains"]
    ]
    if not points:
        return None
    x, y, groups = zip(*points, strict=True)
    found = rank_correlation(x, y, groups)
    alone = {}
    for number, row in enumerate(rows):
        own = [(gain, loss) for gain, loss, group in points if group == number]
        one = rank_correlation(*zip(*own, strict=True), [0] * len(own)) if own else None
        if one is not None:
            alone[row["task"]] = round(one.rho, 3)
    return found and {
        "rho": found.rho,
        "low": found.low,
        "high": found.high,
        "points": found.num_points,
        "tasks": alone,
    }


def write_results(rows: list[Row], out: Path) -> None:
    rows.sort(key=lambda row: list(TASKS).index(row["task"]))
    labels = {METHODS[name].label for name in CONSTRUCTORS}
    losses = {row["task"]: trained_losses(row["campaign"], row["task"], rank=16, targets=None) for row in rows}
    constructors = {task: {name: own[name] for name in own if name in labels} for task, own in losses.items()}
    metric = {
        row["task"]: trained_losses("pocket-ablations", row["task"], **TRAINED_ALIKE, method="fcca")
        for row in rows
        if row["campaign"] == "pocket"
    }
    for row in rows:
        row["against_the_best"] = against_the_best(row)
        row["trained"] = {name: round(loss, 5) for name, loss in constructors[row["task"]].items()}
        row["trained_metric"] = {name: round(loss, 5) for name, loss in metric.get(row["task"], {}).items()}
    found = {
        "benchmark": "advice",
        "constructors": correlated(rows, constructors),
        "metric": correlated(rows, metric),
        "rows": rows,
        "load": load_average(),
        "provenance": provenance(),
    }
    write_json(out, found)
    print(json.dumps({name: found[name] for name in ("constructors", "metric")}, indent=1))


def draw(rows: list[Row], path: Path) -> None:
    """A panel for each task: the loss that training gave by the gain that advice said."""
    figure, panels = plt.subplots(2, 4, figsize=(12, 5.6))
    colours = {METHODS[name].label: method_colour(name) for name in CONSTRUCTORS}
    for axes, row in zip(panels.flat, rows, strict=False):
        for name, loss in row["trained"].items():
            axes.plot(row["gains"][name], loss, "o", color=colours[name], ms=5)
            axes.annotate(
                name.removesuffix("-core"),
                (row["gains"][name], loss),
                fontsize=6,
                xytext=(3, 3),
                textcoords="offset points",
            )
        axes.set_title(row["task"], fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(rows) :]:
        axes.axis("off")
    figure.supxlabel("gain before training, nats", fontsize=9)
    figure.supylabel("held-out loss when trained", fontsize=9)
    figure.tight_layout()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder of tiny1m; its tasks are left out without it")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--only", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "advice.json")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--quick", action="store_true", help="One task, few rows, one round: its numbers mean nothing.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    few = {"calibration_size": 32} if given.quick else {}
    for task in ["pocket-comparison"] if given.quick else given.only:
        known = any(row["task"] == task for row in rows)
        if not known and (TASKS[task] == "pocket" or given.model):
            config = configuration(task, given.model, given.data_root).model_copy(update=few)
            rows.append(advised(task, config, 1 if given.quick else ROUNDS))
    write_results(rows, given.out)
    if given.figure:
        draw(rows, given.figure)


if __name__ == "__main__":
    main()
