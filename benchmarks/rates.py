"""How near does the proposed learning rate of a core come to the best one, and what is lost by a fixed one?

    python benchmarks/rates.py --model DIR --data-root DIR --sets trec_coarse,sst2 --rates 1e-2 --factors .5,2 # resumes

Each data set trains a core on 128 of its rows (two epochs of eight rows a step, warm-up .1, cosine) at the proposed
rate, at its multiples and at each given one, on one basis from the same rows, and a LoRA of rank 16 with alpha 32 at
each LoRA rate. A line of the results is the held-out loss of one arm, in nats per token of the completion, on 96 rows.
One thread; float32, or another dtype, which is then part of the model's name.

Set on 29 November 2026, before half of the proposed rate was tried at 0.5B: ``FISHER_STEP`` is halved if half of the
rate loses less to the best rate tried, in the mean of both models' means over the data sets that have both, and not
more on the worst set. Otherwise it stays.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from contestants import ATTENTION
from frozencore import calibrate, swap_core
from frozencore.files.fingerprint import fingerprint_model
from frozencore.tune.calibration_record import CalibrationSummary
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.many.tenant import Tenant, train_many
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import overhead_tokens_of
from harness import ROOT, Record, parser_of, study_file, table, with_range
from tenant_study import ALL_LINEAR, RANK, Results, adapted, rows_of, study_model, zero_core
from tenant_tables import with_interval

TRAIN, HELD_OUT, ROWS_A_STEP, EPOCHS, WARMUP, SEED = 128, 96, 8, 2, 0.1, 42
NAMES = ("model", "set", "method", "rank", "arm")


def recipe(rate: float) -> Recipe:
    return Recipe(rate, WARMUP, epochs=EPOCHS, batch_size=ROWS_A_STEP, accumulation=1, seed=SEED)


def measure_cores(
    model: nn.Module, pad_id: int, rows: list[TokenRow], held_out: list[TokenRow], rates: list[float],
    factors: list[float], about: Record, results: Results, targets: tuple[str, ...] | str,
) -> None:  # fmt: skip
    """Add the lines of a core at the proposed rate, at its multiples and at the given ones, on one basis."""
    with adapted(model, about["method"].partition(",")[0], about["rank"], targets=targets) as core:
        calibration = calibrate(core, calibration_batches(rows, pad_id), progress=False)
        proposed = calibration.learning_rate
        tenants = {"proposed": proposed, **{f"{rate:g}": rate for rate in rates}}
        tenants |= {f"x{factor:g}": factor * proposed for factor in factors}
        for arm, rate in tenants.items():
            if not results.get({**about, "arm": arm}):
                done: dict[str, Any] = {}
                swap_core(core, zero_core(core))
                train_many(core, {arm: Tenant(rows, recipe(float(f"{rate:.3g}")))}, done.update, pad_id=pad_id)
                if done[arm].diverged is None:
                    swap_core(core, done[arm].core)
                    (loss,) = held_out_losses(core, [held_out], pad_id=pad_id)
                losses = [round(one, 4) for one in done[arm].report.training.losses if one is not None]
                found = {"loss": None if done[arm].diverged else loss, "training_losses": losses}
                found |= CalibrationSummary.of(calibration).median_spread
                results.add({**about, "arm": arm, "rate": float(f"{rate:.3g}"), **found})


MODELS = {
    "smollm2": "SmolLM2-135M",
    "half": "Qwen2.5-Coder-0.5B",
    "coder": "Qwen2.5-Coder-1.5B",
    "coder, bfloat16": "Qwen2.5-Coder-1.5B, bfloat16",
    "spread-0": "tiny1m",
    "spread-1": "tiny1m, spread 1",
    "spread-2": "tiny1m, spread 2",
}
"""Models by folder; a spread is that with which rescale.py widens the channels."""
COMPARED_MODELS = "smollm2", "half"
KINDS = {"fcca": "FCCA", "rawgrad": "RawGrad", "eva": "EVA", "random": "Random"}
FACTORS = {"x0.5": "half of it", "proposed": "proposed rate", "x2": "twice"}
FIXED = 1e-2  # the default before rates were measured
LORA_DEFAULT = 2e-4
COMPARED = {
    "core, 0.01": "a core at 1e-2", "core, x0.5": "a core at half the rate", "core, x2": "a core at twice the rate",
    "core, best rate tried": "a core at the best rate tried", "LoRA, 0.0002": "a LoRA of rank 16 at 2e-4",
    "LoRA, 0.001": "a LoRA of rank 16 at 1e-3",
}  # fmt: skip


def table_of(lines: list[Record]) -> str:
    """Losses of a core at the proposed rate, at the fixed one and at the best one tried, and of LoRA, by data set."""
    rows = []
    sets = dict.fromkeys((line["model"], line["set"]) for line in lines)
    for model, name in sorted(sets, key=lambda one: list(MODELS).index(one[0])):
        here = [line for line in lines if (line["model"], line["set"]) == (model, name)]
        cores = [line for line in here if (line["method"], line["rank"]) == ("fcca", RANK)]
        by_arm = {line["arm"]: line for line in cores} | {line["method"]: line for line in here if line["rank"] == 0}
        if "proposed" not in by_arm or f"{FIXED:g}" not in by_arm:
            continue
        best = min((line for line in cores if line["loss"] is not None), key=lambda line: line["loss"])
        loras = sorted((line for line in here if line["method"] == "lora"), key=lambda line: line["loss"])
        losses = [at_rate(by_arm["proposed"]), at_rate(by_arm[f"{FIXED:g}"]), f"{at_rate(best)}, {len(cores)} tried"]
        default = [at_rate(line) for line in loras if line["rate"] == LORA_DEFAULT] or ["not run"]
        of_lora = (
            [*default, f"{at_rate(loras[0])}, {len(loras)} tried"] if len(loras) > 1 else [*default, "not searched"]
        )
        rows.append([f"{MODELS[model]}, {name}", f"{by_arm['base']['loss']:.3f}", *losses, *of_lora])
    best_tried = "best rate tried"
    core, lora = ["core, proposed rate", "core, 1e-2", f"core, {best_tried}"], ["LoRA, 2e-4", f"LoRA, {best_tried}"]
    return table(["model and data set", "base model", *core, *lora], rows)


def means_of(lines: list[Record]) -> str:
    """What other choices of the rate have above the proposed one, in the mean over the data sets that have both."""
    rows = []
    for model in COMPARED_MODELS:
        found: dict[str, dict[str, float]] = {}
        for line in (line for line in lines if line["model"] == model and line["loss"] is not None):
            if (line["method"], line["rank"]) == ("fcca", RANK):
                found.setdefault(f"core, {line['arm']}", {})[line["set"]] = line["loss"]
                best = found.setdefault("core, best rate tried", {})
                best[line["set"]] = min(line["loss"], best.get(line["set"], line["loss"]))
            elif line["method"] == "lora":
                found.setdefault(f"LoRA, {line['arm']}", {})[line["set"]] = line["loss"]
        proposed = found.pop("core, proposed", {})
        for arm, title in COMPARED.items():
            both = [name for name in found.get(arm, {}) if name in proposed]
            if len(both) > 1:
                differences = np.array([[found[arm][name] - proposed[name]] for name in both])
                found_apart = with_interval(differences, both)
                means = (f"{np.mean([of[name] for name in both]):.3f}" for of in (proposed, found[arm]))
                rows.append([f"{MODELS[model]}: {title}", str(len(both)), *means, with_range(found_apart, "+.3f")])
    return table(["beside the proposed rate", "data sets", "proposed", "this", "this minus proposed"], rows)


def others_table(lines: list[Record]) -> str:
    """The mean loss of cores at the proposed rate, at half and at twice of it, by constructor and rank."""
    found: dict[tuple[str, str, int], dict[str, dict[str, Record]]] = {}
    for line in lines:
        if line["method"].partition(",")[0] in KINDS and line["arm"] in FACTORS:
            place = line["model"], line["method"], line["rank"]
            found.setdefault(place, {}).setdefault(line["set"], {})[line["arm"]] = line
    rows = []
    for (model, method, rank), sets in found.items():
        whole = [arms for arms in sets.values() if FACTORS.keys() <= arms.keys()]
        if whole:
            losses = (f"{np.mean([arms[arm]['loss'] for arms in whole]):.3f}" for arm in FACTORS)
            middle = f"{np.median([arms['proposed']['rate'] for arms in whole]):.2g}"
            kind, _, layers = method.partition(",")
            core = f"{MODELS[model]}, {KINDS[kind]}, r = {rank}" + (f",{layers}" if layers else "")
            rows.append([core, str(len(whole)), middle, *losses])
    return table(["core", "data sets", "median rate", *(f"loss, {name}" for name in FACTORS.values())], rows)


def size_table(lines: list[Record]) -> str:
    """Other methods minus FCCA by model, at the proposed rate and at the best of half, one and two times that rate.

    A LoRA has no proposed rate: its larger one stands in its place.
    """
    kinds = KINDS | {"lora": "LoRA, r = 16, at 1e-3"}
    found: dict[tuple[str, str], dict[str, dict[str, Record]]] = {}
    for line in lines:
        arm = "proposed" if (line["method"], line["arm"]) == ("lora", "0.001") else line["arm"]
        if line["rank"] == RANK and line["method"] in kinds and arm in FACTORS:
            found.setdefault((line["model"], line["method"]), {}).setdefault(line["set"], {})[arm] = line
    spreads: dict[str, dict[str, float]] = {}
    for line in lines:
        if line.get("input_spread"):
            spreads.setdefault(line["model"], {})[line["set"]] = line["input_spread"]
    rows = []
    for model, method in sorted(found, key=lambda of: ([*MODELS].index(of[0]), [*kinds].index(of[1]))):
        ours, theirs = found.get((model, "fcca"), {}), found[model, method]
        if method == "fcca":
            continue
        cells = []
        for arms in (["proposed"], [*FACTORS]):
            both = [name for name in theirs if all(set(arms) <= of.get(name, {}).keys() for of in (ours, theirs))]
            losses = np.array([[min(map(loss_of, map(of[name].get, arms))) for of in (ours, theirs)] for name in both])
            cells += [str(len(both)), difference_of(losses[:, 1:] - losses[:, :1], both) if both else ""]
        spread = f"{np.mean([*spreads[model].values()]):,.0f}" if model in spreads else ""
        rows.append([f"{MODELS[model]}: {kinds[method]}", spread, *cells])
    heads = ["data sets", "minus FCCA, proposed rates", "data sets", "minus FCCA, best of three rates"]
    return table(["loss", "largest over median", *heads], rows)


def loss_of(line: Record) -> float:
    return inf if line["loss"] is None else line["loss"]


def difference_of(differences: NDArray[np.float64], names: list[str]) -> str:
    """A mean with its interval, which needs more than one data set."""
    if len(names) > 1:
        return with_range(with_interval(differences, names), "+.3f")
    return f"{differences.mean():+.3f}"


def at_rate(line: Record) -> str:
    loss = "diverged" if line["loss"] is None else f"{line['loss']:.3f}"
    return f"{loss} ({line['rate']:.2g})"


def main() -> None:
    parser = parser_of(__doc__, "rates", "jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path, help="a folder of folders with NAME.train.jsonl and NAME.eval.jsonl")
    parser.add_argument("--sets", default="reviews", help="names of data sets, separated by commas")
    parser.add_argument("--methods", default="fcca")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--all-linear", action="store_true", help="Cores on all linear layers, not on attention alone.")
    parser.add_argument("--rates", default="", help="rates of the core beside the proposed one")
    parser.add_argument("--factors", default="", help="further rates of the core, as multiples of the proposed one")
    parser.add_argument("--lora-rates", default="", help="rates of a LoRA of rank 16")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    file = study_file(options)
    model, encoder, here = study_model(options, options.dtype)
    results = Results(file, {"seed": SEED, **here}, NAMES)
    called = Path(options.model).name + f", {options.dtype}" * (options.dtype != "float32")
    which = {"model": called, "model_sha256": fingerprint_model(model)[:16]}
    others = {line["model_sha256"] for line in results.found.values() if line["model"] == which["model"]}
    if odd := others - {which["model_sha256"]}:
        raise SystemExit(
            f"{file} has lines of a model {which['model']!r} of other weights, {odd.pop()}. Load that model."
        )
    rates, factors, lora_rates = (
        [float(number) for number in text.split(",") if number]
        for text in (options.rates, options.factors, options.lora_rates)
    )
    for name in options.sets.split(","):
        if options.quick:
            every = rows_of(ROOT / "examples" / "reviews.jsonl")
            rows, held_out = encoder.encode(every[:16]), encoder.encode(every[16:20])
        else:
            (file,) = options.data_root.glob(f"*/{name}.train.jsonl")
            rows = encoder.encode(rows_of(file)[:TRAIN])
            held_out = encoder.encode(rows_of(file.with_name(f"{name}.eval.jsonl"))[:HELD_OUT])
        place = {**which, "set": name}
        if not results.get(base := {**place, "method": "base", "rank": 0, "arm": "base"}):
            (loss,) = held_out_losses(model, [held_out], pad_id=encoder.pad_id)
            results.add({**base, "loss": loss})
        for method in options.methods.split(","):
            about = {**place, "method": method + ALL_LINEAR * options.all_linear, "rank": options.rank}
            targets = "all-linear" if options.all_linear else ATTENTION
            measure_cores(model, encoder.pad_id, rows, held_out, rates, factors, about, results, targets)
        for rate in lora_rates:
            about = {**place, "method": "lora", "rank": 16, "arm": f"{rate:g}"}
            if not results.get(about):
                with adapted(model, "lora", 16) as lora:
                    for module in lora.modules():
                        if isinstance(scaling := getattr(module, "scaling", None), dict):
                            scaling["default"] = 2.0  # alpha 32, as most examples have it
                    grouped = replace(recipe(rate), overhead_tokens=overhead_tokens_of(model))
                    train(lora, rows, grouped, pad_id=encoder.pad_id)
                    (loss,) = held_out_losses(lora, [held_out], pad_id=encoder.pad_id)
                results.add({**about, "rate": rate, "loss": loss})


if __name__ == "__main__":
    main()
