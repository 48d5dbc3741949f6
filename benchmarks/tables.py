"""The generated parts of the pages, from the files in results/ and the records of the campaigns.

    python benchmarks/tables.py            # rewrites all, figures too;  --check says whether the pages are up to date

A page holds a block between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. Cells with ± are means over seeds and
their standard deviation; differences are paired by seed (of tenants: by tenant and seed), with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t

import calibration
import gpu
import many_training
import served
import smollm2
import step
import tenants
import tenants_quality
from harness import RESULTS, ROOT, lines_of, table

DOCS, README, LAB_RESULTS = ROOT / "docs", ROOT / "README.md", ROOT / "lab" / "results"
Found = Mapping[str, Any]
NAMES = {
    "fcca": "FCCA", "rawgrad": "RawGrad", "signgrad": "SignGrad", "filora": "FiLoRA", "eva": "EVA", "milora": "MiLoRA",
    "lora_xs": "LoRA-XS", "vera": "VeRA's bases", "random": "Random", "lora": "LoRA", "dora": "DoRA",
    "pissa": "PiSSA", "full": "full fine-tuning",
}  # fmt: skip
DEFAULTS = {
    "whiten": "both", "damping": 1e-3, "coordinates": "fisher", "rank": 16, "alpha": "auto", "targets": None,
    "fisher": "diagonal", "shrinkage": 0.0, "calibration_task": None, "calibration_size": 128, "dtype": "auto",
}  # fmt: skip
"""What the ablations change, in the order of their lines, and FCCA's defaults."""


# ---------------------------------------------------------------------------------------------- quality on a real model


def final_runs() -> dict[str, dict[str, list[Found]]]:
    """The final runs by task and by name of the method, each in the order of its seeds."""
    found: dict[str, dict[str, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(lines_of(LAB_RESULTS / "smollm2" / "records.jsonl"), key=lambda record: record["seed"]):
        if record["config"]["evaluate_on"] == "evaluation":
            found[record["task"]][named(record)].append(record)
    return found


def named(record: Found) -> str:
    """The method as a table names it: of LoRA with its rank and its layers."""
    config, name = record["config"], NAMES[record["method"]]
    if record["method"] in ("lora", "dora", "pissa"):
        name += f", r = {config.get('rank', 16)}"
    return f"{name}, all linear layers" if config.get("targets") == "all-linear" else name


def spread(values: Sequence[float], digits: int, times: float = 1.0) -> str:
    """The mean and the standard deviation."""
    return f"{times * fmean(values):.{digits}f} ± {times * stdev(values):.{digits}f}"


def held_out_loss(record: Found) -> float:
    return record["held_out_loss"]


def risen(record: Found) -> float:
    """Nats a token by which the loss on the texts of other tasks rose, the mean over these tasks."""
    return fmean(other["loss"] - other["loss_before"] for other in record["forgetting"].values())


def difference(runs: Sequence[Found], others: Sequence[Found], value: Callable[[Found], float] = held_out_loss) -> str:
    """The mean difference of a value, seed by seed, with half of the 95 % interval of Student's t."""
    found = [value(one) - value(other) for one, other in zip(runs, others, strict=True)]
    half = float(t.ppf(0.975, len(found) - 1)) * stdev(found) / math.sqrt(len(found))
    return f"{fmean(found):+.3f} ± {half:.3f}"


def by_loss(methods: Mapping[str, list[Found]]) -> list[tuple[str, list[Found]]]:
    """The methods, the lowest mean loss first."""
    return sorted(methods.items(), key=lambda item: fmean(map(held_out_loss, item[1])))


def of_task(methods: Mapping[str, list[Found]]) -> str:
    """A task's table: the base model, then the methods by their mean loss."""
    some, fcca = next(iter(methods.values()))[0], methods["FCCA"]
    rows = [["base model", "", "", f"{100 * some['accuracy_before']:.1f}", f"{some['held_out_loss_before']:.3f}"]]
    rows[0] += ["", "", ""]
    for name, runs in by_loss(methods):
        scores = spread([run["accuracy"] for run in runs], 1, 100), spread([*map(held_out_loss, runs)], 3)
        apart = [""] * 2 if runs is fcca else [difference(runs, fcca), difference(runs, fcca, risen)]
        rate = f"{runs[0]['resolved']['recipe']['learning_rate']:g}"
        rises = spread([*map(risen, runs)], 2)
        rows.append([name, rate, f"{runs[0]['values_at_once']:,}", *scores, apart[0], rises, apart[1]])
    heads = ["method", "learning rate", "values", "accuracy, %", "held-out loss", "minus FCCA's"]
    return table([*heads, "rise on other texts", "rise minus FCCA's"], rows)


def ablations() -> str:
    """FCCA with one option changed: losses beside those of the default, a line a change."""
    found: dict[tuple[tuple[str, str], ...], list[Found]] = defaultdict(list)
    records = lines_of(LAB_RESULTS / "smollm2-ablations" / "records.jsonl")
    trained = [record for record in records if record.get("task") == "sst2"]
    for record in sorted(trained, key=lambda record: record["seed"]):
        config = record["config"]
        options = {**config, **config["core"], **config["calibration"]}
        changes = [(name, shown(options[name])) for name in DEFAULTS if options[name] != DEFAULTS[name]]
        found[tuple(changes)].append(record)
    default, names = found.pop(()), list(DEFAULTS)
    changed = sorted(found.items(), key=lambda one: [(names.index(name), len(value), value) for name, value in one[0]])
    rows = []
    for changes, runs in [((("", "default"),), default), *changed]:
        what = ", ".join(f"{name} {value}".strip() for name, value in changes).replace("alpha none", "scale 1")
        scores = spread([run["accuracy"] for run in runs], 1, 100), spread([*map(held_out_loss, runs)], 3)
        apart = "" if runs is default else difference(runs, default)
        rows.append([what, f"{runs[0]['values_at_once']:,}", *scores, apart])
    return table(["changed", "values", "accuracy, %", "held-out loss", "minus the default's"], rows)


def shown(value: object) -> str:
    if isinstance(value, list):
        return "/".join(name.removesuffix("_proj") for name in value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def outliers() -> str:
    """Held-out losses of constructors on one model whose channels are rescaled more and more."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in lines_of(LAB_RESULTS / "outliers" / "records.jsonl"):
        config = record["config"]
        if config["evaluate_on"] == "evaluation" and config["core"]["coordinates"] == "qr":
            found[NAMES[record["method"]]][config["model"].rpartition("-")[2]].append(held_out_loss(record))
    rows = [[method, *(spread(losses[size], 3) for size in sorted(losses))] for method, losses in found.items()]
    return table(["held-out loss at a spread of", *sorted(next(iter(found.values())))], rows)


def stability() -> str:
    """Mean cosines of the principal angles between bases of few and of many calibration rows, by the number of few."""
    found: dict[int, list[Found]] = defaultdict(list)
    for record in lines_of(LAB_RESULTS / "smollm2-ablations" / "records.jsonl"):
        if "cosine_Q" in record:
            found[record["num_calibration"]["basis"]].append(record)
    sides = {
        size: [spread([one[f"cosine_{side}"] for one in runs], 3) for side in "PQ"] for size, runs in found.items()
    }
    return table(["calibration rows", "P", "Q"], [[str(size), *sides[size]] for size in sorted(sides)])


# ------------------------------------------------------------------------------------------------------------ the pages


def found_in(name: str) -> Found:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def pages() -> Iterator[tuple[Path, dict[str, str]]]:
    """Every page with its blocks by name."""
    tasks = {f"smollm2-{task}": of_task(methods) for task, methods in final_runs().items()}
    study, in_vllm = tenants_quality.Tenants().table(), found_in("served")
    yield README, {"smollm2-sst2": tasks["smollm2-sst2"], "tenants": study, "served": served.most_tenants(in_vllm)}
    yield DOCS / "outliers.md", {"outliers": outliers()}
    cost = {name: module.table_of(found_in(name)) for name, module in (("step", step), ("calibration", calibration))}
    yield DOCS / "cost.md", cost | {"gpu": gpu.table_of(found_in("gpu"))}
    speed = {"smollm2-speed": smollm2.table_of(found_in("smollm2"))}
    yield DOCS / "smollm2.md", {**tasks, "smollm2-ablations": ablations(), "smollm2-stability": stability(), **speed}
    many = {"tenants": study, "tenants-keep": tenants.keep_table(found_in("tenants"))}
    many["tenants-batch"] = tenants.batch_table(found_in("tenants"), found_in("tenants-smollm2"))
    many["many-training"] = many_training.table_of(found_in("many_training"))
    yield DOCS / "many-cores.md", many
    yield DOCS / "serving.md", {"served": served.table_of(in_vllm)}


def rewritten(page: str, blocks: Mapping[str, str]) -> str:
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        page, count = marked.subn(lambda found, block=block: found[1] + block + found[2], page)
        if count != 1:
            raise ValueError(f"The page must hold the block {name!r} once, but has it {count} times.")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; the status is 1 where a page differs.")
    options = parser.parse_args()
    different = []
    for page, blocks in pages():
        text = page.read_text(encoding="utf-8")
        wanted = rewritten(text, blocks)
        if wanted != text:
            different.append(page.name)
            if not options.check:
                page.write_text(wanted, encoding="utf-8")
    print(f"Not up to date: {', '.join(different) or 'nothing'}.")
    return int(options.check and bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
