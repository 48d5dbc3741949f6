"""Is `frozencore advise` right?  Compare its advice on constructors with the trained losses in results/advice.json.

    nice python benchmarks/advice.py --data-root DIR --model DIR --out FILE   # minutes;  --only TASK: one of the seven
    python benchmarks/advice.py --quick --out FILE                    # a few rows, which only shows that it runs

``--model`` is ``tiny1m``; the pocket model is in the package. An outcome is the held-out loss of a constructor at its
best searched setting, the mean of three seeds, in one of the campaigns ``tiny1m-text`` and ``pocket``. FCCA's damping
and sides have outcomes in ``pocket-ablations``. The three campaigns are in the history, in lab/results of commit
39e574ff. Rank correlations are taken within tasks, with a bootstrap interval over tasks and constructors.

Times are seconds of CPU of one thread, the median of three rounds, over those of a plain forward and backward pass over
the same rows, with and without gradients of the weights. Tasks that are in ``--out`` already are not advised on again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
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
from harness import RESULTS, cpu_s, load_average

OUTCOMES = RESULTS / "advice.json"
TASKS = {
    "hellaswag-text": "tiny1m-text", "gsm8k-text": "tiny1m-text", "sst2-text": "tiny1m-text",
    "pocket-math": "pocket", "pocket-sentiment": "pocket", "pocket-entailment": "pocket", "pocket-comparison": "pocket",
}  # fmt: skip
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
    batches = calibration_batches(prepared.rows.calibration, prepared.encoder.pad_id)
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


def correlated(rows: list[Row], outcome: str) -> Row | None:
    """Over all tasks together, and of each by itself."""
    points = [
        (row["gains"][name], -loss, number)
        for number, row in enumerate(rows)
        for name, loss in row[outcome].items()
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
    """Write the advice beside the outcomes; what the best bases gave is known where advice names the same ones."""
    rows.sort(key=lambda row: list(TASKS).index(row["task"]))
    outcomes = {row["task"]: row for row in json.loads(OUTCOMES.read_text(encoding="utf-8"))["rows"]}
    for row in rows:
        known = outcomes[row["task"]]
        row["against_the_best"] = known["against_the_best"] if row["bases"] == known["bases"] else None
        row |= {name: known[name] for name in ("trained", "trained_metric")}
    found = {
        "benchmark": "advice",
        "constructors": correlated(rows, "trained"),
        "metric": correlated(rows, "trained_metric"),
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
    parser.add_argument("--out", type=Path, default=OUTCOMES)
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
