"""The generated parts of the pages and their pictures, from the files in results/ and the records of the campaigns.

    python benchmarks/tables.py            # rewrites all, pictures too;  --check says whether they are up to date

A page holds a block between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; the block's last line names its source.
Cells with ± are means over seeds and their standard deviation; differences are paired by seed (of tenants: by tenant
and seed), with 95 % intervals, which are those of ``frozencore campaign report``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import calibration
import compress_quality
import figures
import gpu
import many_tenants
import many_training
import served
import smollm2
import starts_quality
import step
import tenant_study
import tenants
import tenants_quality
from frozencore.tune.record import read_record
from frozencore_lab.reports.statistics import Scored, adjusted, paired_difference, scored
from harness import RESULTS, ROOT, lines_of, table
from tenant_rows import TENANTS

DOCS, README, LAB_RESULTS = ROOT / "docs", ROOT / "README.md", ROOT / "lab" / "results"
Found = Mapping[str, Any]
Arms = Mapping[tuple[str, int], tenant_study.Lines]
"""The lines of the study of tenants, three seeds of them."""
TWO_TASKS = {"sst2": "smollm2-seeds", "hellaswag": "smollm2-endings"}
"""The campaign with the most seeds of each task."""
NAMES = {
    "fcca": "FCCA", "rawgrad": "RawGrad", "signgrad": "SignGrad", "filora": "FiLoRA", "eva": "EVA", "milora": "MiLoRA",
    "lora_xs": "LoRA-XS", "vera": "VeRA's bases", "random": "Random", "lora": "LoRA", "dora": "DoRA",
    "pissa": "PiSSA", "full": "full fine-tuning",
}  # fmt: skip
DEFAULTS = {
    "whiten": "both", "damping": 1e-3, "coordinates": "fisher", "rank": 16, "alpha": "auto", "targets": None,
    "fisher": "diagonal", "shrinkage": 0.0, "calibration_task": None, "calibration_size": 128, "dtype": "bfloat16",
}  # fmt: skip
"""What the ablations change, in the order of their lines, and FCCA's defaults."""


# ---------------------------------------------------------------------------------------------- quality on a real model


@cache  # a file of megabytes, of which several blocks and pictures are made
def final_runs(campaign: str) -> dict[str, dict[str, list[Found]]]:
    """A campaign's final runs by task and by name of the method, each in the order of its seeds."""
    found: dict[str, dict[str, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(lines_of(LAB_RESULTS / campaign / "records.jsonl"), key=lambda record: record["seed"]):
        if record["config"]["evaluate_on"] == "evaluation":
            found[record["task"]][named(record)].append(record)
    return found


def named(record: Found) -> str:
    """The method as a table names it, with its rank (of a core if it is not 16) and its layers."""
    config, name = record["config"], NAMES[record["method"]]
    rank = config.get("rank", 16)
    if record["method"] in ("lora", "dora", "pissa") or rank != 16:
        name += f", r = {rank}"
    return f"{name}, all linear layers" if config.get("targets") == "all-linear" else name


def spread(values: Sequence[float], digits: int, times: float = 1.0) -> str:
    """The mean and the standard deviation."""
    return f"{times * fmean(values):.{digits}f} ± {times * stdev(values):.{digits}f}"


def before(runs: Sequence[Found]) -> tuple[str, str]:
    """The base model's accuracy and loss on the rows of these runs."""
    accuracy = fmean(one["accuracy_before"] for one in runs)
    return f"{100 * accuracy:.1f}", f"{fmean(one['held_out_loss_before'] for one in runs):.3f}"


def rate_of(record: Found) -> float:
    return record["resolved"]["recipe"]["learning_rate"]


def held_out_loss(record: Found) -> float:
    return record["held_out_loss"]


def risen(record: Found) -> float:
    """Nats a token by which the loss on the texts of other tasks rose, the mean over these tasks."""
    return fmean(other["loss"] - other["loss_before"] for other in record["forgetting"].values())


def scores_by_row(runs: Sequence[Found], key: str) -> list[Scored]:
    """The scores of runs by row, where the records hold them."""
    return [found for one in runs if (found := scored(read_record(json.dumps(one)), key)) is not None]


def differences(others: Sequence[Sequence[Found]], runs: Sequence[Found], key: str) -> list[str]:
    """The differences of several methods' runs from one method's."""
    return differences_of([(other, runs) for other in others], key)


def differences_of(pairs: Sequence[tuple[Sequence[Found], Sequence[Found]]], key: str) -> list[str]:
    """Each pair's first minus second, with degrees of freedom; a star marks p < .05 after Holm over all pairs."""
    scores = [[scores_by_row(runs, key) for runs in pair] for pair in pairs]
    found = adjusted([paired_difference(one, other) for one, other in scores])
    stars = ["" if one.holm is None or one.holm >= 0.05 else " *" for one in found]
    return [
        f"{one.mean:+.3f} ± {one.half:.3f}{star}" + ("" if one.freedom is None else f" [{one.freedom:.0f}]")
        for one, star in zip(found, stars, strict=True)
    ]


def by_loss(methods: Mapping[str, list[Found]]) -> list[tuple[str, list[Found]]]:
    """The methods, the lowest mean loss first."""
    return sorted(methods.items(), key=lambda item: fmean(map(held_out_loss, item[1])))


def by_values(methods: Mapping[str, list[Found]]) -> list[tuple[str, list[Found]]]:
    """The methods, the fewest trained values first."""
    return sorted(methods.items(), key=lambda item: item[1][0]["values_at_once"])


def of_task(methods: Sequence[tuple[str, list[Found]]]) -> str:
    """A task's table: the base model, then the methods in their order."""
    fcca = dict(methods)["FCCA"]
    rows = [["base model", "", "", *before(fcca), "", "", ""]]
    others = [(name, runs) for name, runs in methods if runs is not fcca]
    losses, rises = (differences([runs for _, runs in others], fcca, key) for key in ("held_out_loss", "forgotten"))
    apart = {name: both for (name, _), *both in zip(others, losses, rises, strict=True)}
    for name, runs in methods:
        scores = spread([run["accuracy"] for run in runs], 1, 100), spread([*map(held_out_loss, runs)], 3)
        rate = f"{rate_of(runs[0]):g}"
        loss, rise = apart.get(name, ["", ""])
        risen_by = spread([*map(risen, runs)], 2)
        rows.append([name, rate, f"{runs[0]['values_at_once']:,}", *scores, loss, risen_by, rise])
    heads = ["method", "learning rate", "values", "accuracy, %", "held-out loss", "minus FCCA's"]
    return table([*heads, "rise on other texts", "rise minus FCCA's"], rows)


def of_values() -> Mapping[str, list[Found]]:
    """Cores and LoRA of several shapes on HellaSwag, each at a rate of its own."""
    return final_runs("smollm2-values")["hellaswag"]


def of_forgetting() -> str:
    """Loss against forgetting: LoRA of rank 1 at its searched rate and at smaller ones, beside FCCA, at three seeds."""
    methods = {"FCCA": of_values()["FCCA"]}
    for name in ("LoRA, r = 1", "LoRA, r = 1, all linear layers"):
        runs = [*final_runs("smollm2-forgetting-first")["hellaswag"][name], *of_values()[name]]
        for rate in sorted({rate_of(run) for run in runs}):
            methods[f"{name}, {rate:g}"] = [run for run in runs if rate_of(run) == rate]
    return of_task(by_loss(methods))


def as_core(name: str) -> str:
    """The name of a shape where all constructors are FCCA."""
    return name.replace("FCCA, all", "core, r = 16, all").replace("FCCA", "core")


EQUAL_VALUES = (
    ("FCCA, r = 32", "LoRA, r = 1"),
    ("FCCA, r = 32, all linear layers", "LoRA, r = 2"),
    ("FCCA, r = 64", "LoRA, r = 4"),
)


def at_equal_values() -> str:
    """Cores beside LoRAs of about as many trained values: the differences, LoRA's minus the core's."""
    found = of_values()
    pairs = [(found[lora], found[core]) for core, lora in EQUAL_VALUES]
    losses, rises = (differences_of(pairs, key) for key in ("held_out_loss", "forgotten"))
    sides = [[f"{as_core(name)}: {found[name][0]['values_at_once']:,}" for name in pair] for pair in EQUAL_VALUES]
    rows = [[*pair, loss, rise] for pair, loss, rise in zip(sides, losses, rises, strict=True)]
    return table(["core: values", "LoRA: values", "held-out loss", "rise on other texts"], rows)


def one_rate() -> str:
    """Constructors in orthonormal coordinates at one rate for all, beside rates of their own: losses less FCCA's.

    The runs of ``smollm2-seeds`` have the rates of their own, Fisher coordinates and the default scale.
    """
    runs = final_runs("smollm2-paper")["sst2"]
    rates: dict[str, dict[str, list[Found]]] = {
        f"{rate:g}": {name: [run for run in own if rate_of(run) == rate] for name, own in runs.items()}
        for rate in sorted({rate_of(run) for own in runs.values() for run in own})
    }
    seeds = [run["seed"] for run in next(iter(rates.values()))["FCCA"]]
    at_own_rates = final_runs("smollm2-seeds")["sst2"]
    rates["their own"] = {name: [run for run in own if run["seed"] in seeds] for name, own in at_own_rates.items()}
    names = [name for name in NAMES.values() if name in runs]
    rows: dict[str, list[str]] = {name: [name] for name in names}
    for methods in rates.values():
        others = [name for name in names if name in methods and name != "FCCA"]
        less = dict(
            zip(others, differences([methods[n] for n in others], methods["FCCA"], "held_out_loss"), strict=True)
        )
        for name in names:
            own = methods.get(name)
            score = f"{100 * fmean(run['accuracy'] for run in own):.1f}" if own else ""
            rows[name] += [score, spread([*map(held_out_loss, own)], 3) if own else "not run", less.get(name, "")]
    heads = [text for rate in rates for text in (f"{rate}: accuracy, %", "held-out loss", "minus FCCA's")]
    return table(["learning rate", *heads], rows.values())


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
    apart = ["", *differences([runs for _, runs in changed], default, "held_out_loss")]
    rows = []
    for (changes, runs), less in zip([((("", "default"),), default), *changed], apart, strict=True):
        what = ", ".join(f"{name} {value}".strip() for name, value in changes).replace("alpha none", "scale 1")
        scores = spread([run["accuracy"] for run in runs], 1, 100), spread([*map(held_out_loss, runs)], 3)
        rows.append([what, f"{runs[0]['values_at_once']:,}", *scores, less])
    return table(["changed", "values", "accuracy, %", "held-out loss", "minus the default's"], rows)


def shown(value: object) -> str:
    if isinstance(value, list):
        return "/".join(name.removesuffix("_proj") for name in value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def outliers() -> str:
    """Held-out losses of two constructors on a model whose channels are rescaled more and more, each at its best."""
    records = lines_of(LAB_RESULTS / "outliers" / "records.jsonl")
    final = [record for record in records if record["config"]["evaluate_on"] == "evaluation"]
    found: dict[str, dict[str, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(final, key=lambda record: record["seed"]):
        found[record["config"]["model"].rpartition("-")[2]][record["method"]].append(record)
    less = differences_of([(of["rawgrad"], of["fcca"]) for _, of in sorted(found.items())], "held_out_loss")
    rows = []
    for (spread_of, runs), apart in zip(sorted(found.items()), less, strict=True):
        both = [runs["fcca"], runs["rawgrad"]]
        cells = [f"{spread([*map(held_out_loss, own)], 3)} at {rate_of(own[0]):g}" for own in both]
        rows.append([spread_of, *cells, apart])
    return table(["spread", "FCCA: loss, learning rate", "RawGrad: loss, learning rate", "RawGrad minus FCCA"], rows)


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


def private() -> str:
    """Accuracies and losses of trainings within a budget, by arm and epsilon."""
    lines = lines_of(RESULTS / "private.jsonl")
    (base,) = (line for line in lines if line["phase"] == "base")
    found: dict[str, dict[float | None, list[Found]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["phase"] == "final":
            found[line["arm"]][line["epsilon"]].append(line)
    names = {
        "public": "core, basis of public rows", "random": "core, random basis", "lora-1": "LoRA, r = 1",
        "lora-16": "LoRA, r = 16",
    }  # fmt: skip
    rows = [["base model", "", *4 * [f"{100 * base['accuracy']:.1f} / {base['loss']:.3f}"]]]
    for arm, name in names.items():
        runs = [found[arm][epsilon] for epsilon in (None, 8.0, 3.0, 1.0)]
        scores = [
            f"{spread([one['accuracy'] for one in of], 1, 100)} / {spread([one['loss'] for one in of], 3)}"
            for of in runs
        ]
        rows.append([name, f"{runs[0][0]['values']:,}", *scores])
    return table(["SST-2: accuracy, % / loss", "values", "not private", "ε = 8", "ε = 3", "ε = 1"], rows)


# ------------------------------------------------------------------------------------------------------------ the pages


def found_in(name: str) -> Found:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def at_a_glance(of_endings: Mapping[str, list[Found]], arms: Arms, in_vllm: Found) -> str:
    """Cores beside LoRAs, a fact a line; bold where the interval of the difference from the shared core has no zero.

    The first column is the base model. A line of an engine has all engines' adapters or is left out.
    """
    shared, everyone = arms["pooled", 16], list(arms["pooled", 16])
    shown = [arms[arm] for arm in (("own", 16), ("pooled", 16), ("lora", 1), ("lora", 16))]
    some = [of[everyone[0]][0] for of in shown]
    accuracies = []
    for of in shown:
        _, low, high = tenant_study.apart(of, shared, everyone, "accuracy")
        mean = tenant_study.values_of(of, everyone, "accuracy").mean()
        accuracies.append(bold(f"{mean:.1f}", low > 0 or high < 0))
    losses = [f"{fmean(map(held_out_loss, of_endings['FCCA'])):.3f}", ""]
    for name in ("LoRA, r = 1", "LoRA, r = 16"):
        apart = paired_difference(
            *(scores_by_row(of, "held_out_loss") for of in (of_endings[name], of_endings["FCCA"]))
        )
        is_apart = abs(apart.mean) > (apart.half or 0.0)
        losses.append(bold(f"{fmean(map(held_out_loss, of_endings[name])):.3f}", is_apart))
    accuracy_before = f"{tenant_study.values_of(arms['base', 0], everyone, 'accuracy').mean():.1f}"
    _, loss_before = before(of_endings["FCCA"])
    return table(
        ["", "base model", "core, own basis, r = 16", "core, shared basis, r = 16", "LoRA, r = 1", "LoRA, r = 16"],
        [
            ["trained values", "0", *(f"{one['values']:,}" for one in some)],
            ["bytes of a tenant on disk", "", *(f"{one['disk_bytes']:,}" for one in some)],
            ["mean accuracy of 24 tenants, %", accuracy_before, *accuracies],
            ["held-out loss on HellaSwag, nats a token", loss_before, *losses],
            compressed_loras(),
            *in_an_engine(in_vllm),
        ],
    )  # fmt: skip


def compressed_loras() -> list[str]:
    """The line on what LoRAs of rank 16 lose as cores of rank 16 on one basis: points of accuracy, by tenant."""
    arms = tenant_study.arms_of(lines_of(RESULTS / "compress-quality.jsonl"))
    loras, cores = arms["lora", 16], arms.get(("lora of all, compressed", 16)) or arms["lora, compressed", 16]
    names = [name for name in loras if name in cores]
    lost = tenant_study.less(cores, loras, names, "accuracy")
    return [f"{len(names)} LoRAs of r = 16 compressed to cores of one basis, points", "", "", lost, "", "0"]


def in_an_engine(in_vllm: Found) -> Iterator[list[str]]:
    """The lines of the table at a glance that vLLM gives: empty until LoRAs of rank 1 were measured there too."""
    engines = [served.BASE, served.BASIS, served.LORA_1, served.LORA]
    rates = {row["engine"]: row["tokens_per_s"] for row in in_vllm["rows"] if row["tenants"] in (0, 64)}
    if served.LORA_1 in rates:
        base, *others = (f"{rates[engine]:.0f}" for engine in engines)
        yield ["64 tenants in vLLM, tokens a second", base, "", *others]
        slots = [f"{1e9 // in_vllm['adapter'][engine]['slot_bytes']:,.0f}" for engine in engines[1:]]
        yield ["slots that fit 1 GB in vLLM", "", "", *slots]


def bold(text: str, is_apart: bool) -> str:
    return f"**{text}**" if is_apart else text


SHOWN = ("FCCA", "RawGrad", "SignGrad", "EVA", "LoRA-XS", "Random", "LoRA, r = 1", "LoRA, r = 16")
"""The methods of the README's figure, in the order of every legend."""


def pictures(arms: Arms, in_vllm: Found) -> Iterator[tuple[str, str]]:
    """Every picture of the pages, by the name of its file."""
    yield "idea", figures.idea()
    yield "calibration", figures.calibration()
    panels = []
    for title, (task, campaign) in zip(("SST-2", "HellaSwag"), TWO_TASKS.items(), strict=True):
        methods = final_runs(campaign)[task]
        points = [point_of([*map(held_out_loss, methods[name])]) if name in methods else None for name in SHOWN]
        seeds = len(methods["FCCA"])
        panels.append(figures.Panel(f"loss on {title}, {seeds} seeds", points, 3))
    colours = [figures.NAVY if name.startswith("LoRA, ") else figures.ORANGE for name in SHOWN]
    about = "Held-out losses of eight methods on two tasks; the numbers are in the table."
    note = "SmolLM2-135M-Instruct; nats a token, lower is better; mean and standard deviation over the seeds."
    yield "smollm2", figures.chart(SHOWN, colours, panels, about, note)
    core = of_values()["FCCA"]
    shapes = [(name, runs) for name, runs in by_values(of_values()) if runs is not core]
    labels = [f"{runs[0]['values_at_once']:,}: {as_core(name).removesuffix(' linear layers')}" for name, runs in shapes]
    panels = [
        figures.Panel(heading, [point_apart(runs, core, key) for _, runs in shapes], digits, True)
        for heading, key, digits in (
            ("loss, nats a token", "held_out_loss", 3),
            ("rise on other texts", "forgotten", 2),
        )
    ]
    colours = [figures.NAVY if "LoRA" in name else figures.ORANGE for name, _ in shapes]
    about = "Differences of cores and LoRAs from a core of rank 16, by trained values; the numbers are in the table."
    note = "HellaSwag; minus a core of rank 16 (30,720 values); three seeds, 95 % intervals."
    yield "values", figures.chart(labels, colours, panels, about, note)
    yield "tenants", of_gains(arms)
    rates = {row["engine"]: row["tokens_per_s"] for row in in_vllm["rows"] if row["tenants"] in (0, 64)}
    slots = {name: 1e9 // one["slot_bytes"] for name, one in in_vllm["adapter"].items()}
    bars = {
        served.BASIS: ("cores on a basis model", figures.ORANGE), served.LORA_1: ("LoRAs, r = 1", figures.NAVY),
        served.LORA: ("LoRAs", figures.NAVY), served.BASE: ("base model alone", figures.GREY),
    }  # fmt: skip
    order = [who for who in bars if who in rates]
    both = (("tokens a second, 64 tenants", rates), ("slots that fit 1 GB", slots))
    panels = [
        figures.Panel(heading, [figures.Point(*3 * [found[who]]) if who in found else None for who in order], 0)
        for heading, found in both
    ]
    about = "Tokens a second and slots in a gigabyte in vLLM; the numbers are in the table."
    note = "SmolLM2-135M-Instruct in vLLM on two CPU cores, adapters of rank 16, float32."
    labels, colours = zip(*(bars[who] for who in order), strict=True)
    yield "served", figures.bars(labels, colours, panels, about, note)


TEAL, BROWN, DARK = "#44AA99", "#B35900", "#222222"
Member = tuple[str, str, int]
"""The name of a point, and its arm and rank."""
Group = tuple[str, str, Sequence[Member]]
"""A label, its colour and its points."""
SHARED: Sequence[Group] = [
    ("LoRA", figures.NAVY, [("r = 1", "lora", 1), ("r = 16", "lora", 16)]),
    ("own basis", figures.ORANGE, [(f"r = {rank}", "own", rank) for rank in (8, 16, 32)]),
    ("one FCCA", figures.BLUE, [(f"r = {rank}", "pooled", rank) for rank in (8, 16, 32)]),
    (
        "another shared basis, or entries of r = 64", DARK,
        [("RawGrad", "rawgrad", 16), ("Random", "random", 16), ("LoRA-XS", "lora_xs", 16), ("entries", "entries", 64)],
    ),
    ("LoRAs compressed", TEAL, [(f"r = {rank}", "lora of all, compressed", rank) for rank in (16, 32, 64)]),
]  # fmt: skip
NEWCOMERS: Sequence[Group] = [
    ("LoRA", figures.NAVY, [("r = 16", "lora", 16)]),
    ("own basis", figures.ORANGE, [("r = 16", "own", 16)]),
    ("one FCCA", figures.BLUE, [("zero", "newcomers, pooled", 16)]),
    ("from others", BROWN, [(start, f"start {start}", 16) for start in ("mean", "weighted", "nearest")]),
    ("a basis learned from 16 cores", TEAL, [(f"r = {rank}", "newcomers, learned", rank) for rank in (16, 32)]),
]


GAINS = (("accuracy, points", "accuracy"), ("nats a token", "loss"))


def of_gains(arms: Arms) -> str:
    """What adapters gain over the base model against the bytes of a tenant.

    Its bytes are those on disk and, of a shared basis, a 24th of P and Q. Arms of the study of tenants have three
    seeds; all else is seed 42, on rows that differ in part. An interval is that of the difference from the core on the
    tenant's own basis.
    """
    today = tenant_study.arms_of(line for name in ("compress-quality", tenant_study.TODAY) for line in lines_in(name))
    everyone = list(arms["own", 16])
    newcomers = [name for name in everyone if not TENANTS[name].calibrated]
    disk = {arm: of[everyone[0]][0].get("disk_bytes", 0) for arm, of in arms.items()}
    of_basis = (disk["own", 16] - disk["pooled", 16]) / 16  # P and Q have as many values a rank

    def size(arm: str, rank: int) -> float:
        if arm in ("own", "lora"):
            return disk[arm, rank]
        if arm == "entries":  # as many values as a core of rank 16, and half as many bytes for where they are
            return 1.5 * disk["pooled", 16] + of_basis * rank / len(everyone)
        return disk["pooled", 16] * (rank / 16) ** 2 + of_basis * rank / len(everyone)

    def gain(arm: tuple[str, int], measure: str, names: Sequence[str]) -> figures.Point | None:
        rows = arms if arm in arms and names is everyone else today
        three = [rows.get(one, {}) for one in (arm, ("own", 16), ("base", 0))]
        if not all(name in of for of in three for name in names):
            return None
        mine, own, base = three
        sign = 1 if measure == "accuracy" else -1
        value = (
            tenant_study.values_of(mine, names, measure).mean() - tenant_study.values_of(base, names, measure).mean()
        )
        middle, low, high = tenant_study.apart(mine, own, names, measure)
        return figures.Point(sign * value, *sorted(sign * (value + edge - middle) for edge in (low, high)))

    def kinds(groups: Sequence[Group], measure: str, names: Sequence[str]) -> list[figures.Kind]:
        made = []
        for label, colour, members in groups:
            points = [(size(arm, rank), name, gain((arm, rank), measure, names)) for name, arm, rank in members]
            if here := [(x, name, point) for x, name, point in points if point is not None]:
                made.append(figures.Kind(label, colour, here))
        return made

    rows = [
        [(f"{who}: {what}", kinds(groups, key, names)) for what, key in GAINS]
        for who, groups, names in (("24 tenants", SHARED, everyone), ("8 newcomers", NEWCOMERS, newcomers))
    ]
    about = "Gains of 24 tenants and of 8 newcomers over the base model against bytes; the numbers are in the tables."
    note = [
        "Gain over the base model, higher is better; bytes of a tenant on disk, with a 24th of a basis that all share.",
        "Bars: 95 % intervals of the difference from an own basis of r = 16, which resample data sets and tenants.",
    ]
    return figures.against_bytes(rows, about, note)


def lines_in(name: str) -> list[Found]:
    """The lines of a file of results; none where nothing was measured yet."""
    file = RESULTS / f"{name}.jsonl"
    return lines_of(file) if file.exists() else []


def point_of(values: Sequence[float]) -> figures.Point:
    """The mean of the seeds, and the standard deviation to both sides."""
    return figures.Point(fmean(values), fmean(values) - stdev(values), fmean(values) + stdev(values))


def point_apart(others: Sequence[Found], runs: Sequence[Found], key: str) -> figures.Point:
    """The difference of a method's runs from another's, with its interval."""
    found = paired_difference(scores_by_row(others, key), scores_by_row(runs, key))
    half = found.half or 0.0
    return figures.Point(found.mean, found.mean - half, found.mean + half)


def from_(block: str, source: str) -> str:
    """A block with a line that says what it was made from."""
    return f"{block}\nFrom {source}.\n"


def pages(arms: Arms, in_vllm: Found) -> Iterator[tuple[Path, dict[str, str]]]:
    """Every page with its blocks by name."""
    with_most_seeds = {task: final_runs(campaign)[task] for task, campaign in TWO_TASKS.items()}
    changed, files = "`lab/results/smollm2-ablations`", "`benchmarks/results/{}.json`"
    many, vllm = "`benchmarks/results/tenants-quality.jsonl`", files.format("served")
    yield (
        README,
        {
            "at-a-glance": from_(
                at_a_glance(with_most_seeds["hellaswag"], arms, in_vllm),
                f"{many}, `benchmarks/results/compress-quality.jsonl`, `lab/results/{TWO_TASKS['hellaswag']}`",
            ),
        },
    )
    step_s, calibration_s = (
        from_(module.table_of(found_in(name)), files.format(name))
        for name, module in (("step", step), ("calibration", calibration))
    )
    yield (
        DOCS / "results.md",
        {
            "seeds-sst2": from_(of_task(by_loss(with_most_seeds["sst2"])), f"`lab/results/{TWO_TASKS['sst2']}`"),
            "seeds-hellaswag": from_(
                of_task(by_loss(with_most_seeds["hellaswag"])), f"`lab/results/{TWO_TASKS['hellaswag']}`"
            ),
            "equal-values": from_(at_equal_values(), "`lab/results/smollm2-values`"),
            "values": from_(of_task(by_values(of_values())), "`lab/results/smollm2-values`"),
            "forgetting": from_(
                of_forgetting(), "`lab/results/smollm2-forgetting-first` and `lab/results/smollm2-values`"
            ),
            "one-rate": from_(one_rate(), "`lab/results/smollm2-paper` and `lab/results/smollm2-seeds`"),
            "smollm2-speed": from_(smollm2.table_of(found_in("smollm2")), files.format("smollm2")),
            "outliers": from_(outliers(), "`lab/results/outliers`"),
            "step": step_s,
            "calibration": calibration_s,
            "gpu": from_(gpu.table_of(found_in("gpu")), files.format("gpu")),
        },
    )
    pressed, compressed = lines_of(RESULTS / "compress-quality.jsonl"), "`benchmarks/results/compress-quality.jsonl`"
    shared, sharing = lines_in(tenant_study.TODAY), f"`benchmarks/results/{tenant_study.TODAY}.jsonl`"
    batches = tenants.batch_table(found_in("tenants"), found_in("tenants-smollm2"))
    yield (
        DOCS / "many-tenants.md",
        {
            "tenants": from_(tenants_quality.sharing_table(lines_in("tenants-quality")), many),
            "tenants-keep": from_(tenants.keep_table(found_in("tenants")), files.format("tenants")),
            "tenants-batch": from_(batches, f"{files.format('tenants')} and {files.format('tenants-smollm2')}"),
            "bases": from_(tenants_quality.bases_table([*pressed, *shared]), f"{compressed} and {sharing}"),
            "starts": from_(starts_quality.starts_table(shared), sharing),
            "compress": from_(compress_quality.table_of(pressed), compressed),
            "compress-kept": from_(compress_quality.kept_table(pressed), compressed),
            "many-training": from_(many_training.table_of(found_in("many_training")), files.format("many_training")),
            "many-tenants": from_(
                many_tenants.table_of(lines_of(RESULTS / "many_tenants.jsonl")),
                "`benchmarks/results/many_tenants.jsonl`",
            ),
        },
    )
    yield ROOT / "examples" / "README.md", {"private": from_(private(), "`benchmarks/results/private.jsonl`")}
    yield (
        ROOT / "lab" / "README.md",
        {
            "smollm2-ablations": from_(ablations(), changed),
            "smollm2-stability": from_(stability(), changed),
        },
    )
    yield DOCS / "serving.md", {"served": from_(served.table_of(in_vllm), vllm)}


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
    different, in_vllm = [], found_in("served")
    arms = tenant_study.arms_of(lines_in("tenants-quality"))
    found = [(page, rewritten(page.read_text(encoding="utf-8"), blocks)) for page, blocks in pages(arms, in_vllm)]
    found += [(DOCS / "figures" / f"{name}.svg", picture) for name, picture in pictures(arms, in_vllm)]
    for page, wanted in found:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        if wanted != text:
            different.append(page.name)
            if not options.check:
                page.write_text(wanted, encoding="utf-8")
    print(f"Not up to date: {', '.join(different) or 'nothing'}.")
    return int(options.check and bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
