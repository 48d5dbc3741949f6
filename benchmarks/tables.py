"""The generated parts of the pages and their pictures, from the files in results/ and the records of the campaigns.

    python benchmarks/tables.py            # rewrites all, pictures too;  --check says whether they are up to date

A page holds a block between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; the block's last line names its sources.
Cells with ± are means over seeds and their standard deviation; differences are paired by seed (of tenants: by tenant
and seed), with 95 % intervals, which are those of ``frozencore campaign report``. A new block is a row of BLOCKS.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import bank_bits
import calibration
import datasets_tables
import devices
import few_bits
import figures
import gpu
import many_tenants
import many_training
import rates
import served
import served_many
import smollm2
import step
import strangers
import tenant_tables
import tenants
from campaign_tables import (
    Runs,
    ablations,
    as_core,
    at_equal_values,
    at_rates,
    by_loss,
    by_rate,
    by_values,
    grouped,
    in_order,
    mean,
    named,
    one_rate,
    outliers,
    scores_by_row,
    spread,
    stability,
    values,
)
from frozencore.tune.record import read_record
from frozencore_lab.reports.statistics import paired_difference
from harness import RESULTS, ROOT, lines_of, table

LAB_RESULTS = ROOT / "lab" / "results"


@cache  # a file of megabytes, of which several blocks and pictures are made
def source(name: str) -> Any:
    """The content of a file of results, nothing if it is not measured yet; or a campaign's final records by seed."""
    if name.endswith(".json"):
        return json.loads((RESULTS / name).read_text(encoding="utf-8"))
    if name.endswith(".jsonl"):
        return lines_of(RESULTS / name) if (RESULTS / name).exists() else []
    with (LAB_RESULTS / name / "records.jsonl").open(encoding="utf-8") as lines:
        final = [run for run in map(read_record, lines) if run.config.content()["evaluate_on"] == "evaluation"]
    return sorted(final, key=lambda run: getattr(run, "seed", 0))


def private(lines: Runs) -> str:
    """Accuracies and losses of trainings within a budget, by arm and epsilon."""
    (base,) = (line for line in lines if line["phase"] == "base")
    found = grouped([line for line in lines if line["phase"] == "final"], lambda line: (line["arm"], line["epsilon"]))
    names = {
        "public": "core, basis of public rows", "random": "core, random basis", "lora-1": "LoRA, r = 1",
        "lora-16": "LoRA, r = 16",
    }  # fmt: skip
    rows = [["base model", "", *4 * [f"{100 * base['accuracy']:.1f} / {base['loss']:.3f}"]]]
    for arm, name in names.items():
        runs = [found[arm, epsilon] for epsilon in (None, 8.0, 3.0, 1.0)]
        scores = ([[line[key] for line in of] for key in ("accuracy", "loss")] for of in runs)
        cells = (f"{spread(right, 1, 100)} / {spread(losses, 3)}" for right, losses in scores)
        rows.append([name, f"{runs[0][0]['values']:,}", *cells])
    return table(["fragment of SST-2: accuracy, % / loss", "values", "not private", "ε = 8", "ε = 3", "ε = 1"], rows)


def at_a_glance(study: Runs, in_vllm: Mapping[str, Any]) -> str:
    """A LoRA of rank 16, one of rank 1 and a core of rank 16 on a shared basis at their best bits, a fact a line."""
    bits = {arm: few_bits.fewest_bits(study, arm) for arm in few_bits.ADAPTERS.values()}
    arms = [few_bits.at_bits(*own) for own in bits.items()]
    engines = [served.LORA, served.LORA_1, served.BASIS]
    slots = [in_vllm["adapter"][engine]["slot_bytes"] for engine in engines]

    def means(measure: str, digits: int, arms: Sequence[tuple[str, int]] = arms) -> tuple[str, list[str]]:
        base, *found = (datasets_tables.by_set(study, arm, measure) for arm in (("base", 0), *arms))
        common = set.intersection(*map(set, found))
        of_base, *means = (f"{fmean(one[name] for name in common):.{digits}f}" for one in (base, *found))
        return f"of {len(common)} data sets (base model {of_base})", means

    (losses, of_loss), (rights, of_exact) = means("loss", 2), means("exact", 1)
    chosen = [datasets_tables.CHOSEN_LORA, datasets_tables.CHOSEN_SMALL, datasets_tables.CHOSEN_FCCA]
    rows = [
        ["bytes of a tenant's values (bits of each)",
         *(f"{few_bits.bytes_of(study, arm):,} ({own})" for arm, own in zip(arms, bits.values(), strict=True))],
        ["tenants in a gigabyte of vLLM", *(f"{1e9 // size:,.0f}" for size in slots)],
        ["64 tenants in vLLM, share of the base model's speed",
         *(f"{served.of_base(in_vllm, engine, 64)[0]:.0%}" for engine in engines)],
        [f"held-out loss {losses}", *of_loss],
        [f"exact answers, % {rights}", *of_exact],
        ["the same loss, at the best of three rates for each", *means("loss", 2, chosen)[1]],
        ["the same answers, %, at the best of three rates for each", *means("exact", 1, chosen)[1]],
    ]  # fmt: skip
    return table(["", *few_bits.ADAPTERS], rows)


def by_hand(found: Mapping[str, Any]) -> str:
    """Seconds and peak memory of commands that were run once by hand, by model; and whether an engine agreed."""
    models = dict.fromkeys(line["model"] for line in found["lines"])
    cells = {
        (line["what"], line["model"]): f"{line['seconds']:,.0f} s, {line['peak_bytes'] / 1e9:.1f} GB"
        for line in found["lines"]
    }
    rows = [
        [what, *(cells.get((what, model), "") for model in models)] for what in dict.fromkeys(at[0] for at in cells)
    ]
    asked = (f"{one['same']} of {one['questions']} with {one['model']}" for one in found["served"])
    agreed = f"vLLM gave the answers of `evaluate`: {', '.join(asked)}.\n"
    return f"{table(['', *models], rows)}\n{agreed}"


TENANTS = ("tenants-quality.jsonl", "compress-quality.jsonl", "sharing-quality.jsonl")
LORA_1 = ("LoRA, r = 1", "LoRA, r = 1, all linear layers")
ON_ALL = ("FCCA, all linear layers", "FCCA, r = 32, all linear layers")
ENDINGS = ("smollm2-forgetting-first", "smollm2-forgetting-cores", "smollm2-values")
REVIEWS = ("smollm2-low-rates", "smollm2-seeds")
SEARCHED = ("RawGrad", "EVA", "Random", "LoRA, r = 1", "LoRA, r = 16")
BLOCKS: Mapping[str, Mapping[str, tuple[Callable[..., str], *tuple[str, ...]]]] = {
    "README.md": {"at-a-glance": (at_a_glance, "datasets-quality.jsonl", "served.json")},
    "docs/core-or-lora.md": {
        "seeds-sst2": (partial(in_order, by_loss), "smollm2-seeds"),
        "seeds-hellaswag": (partial(in_order, by_loss), "smollm2-endings"),
        "equal-values": (at_equal_values, "smollm2-values"),
    },
    "docs/learning-rate.md": {
        "rates": (rates.table_of, "rates.jsonl"),
        "rates-means": (rates.means_of, "rates.jsonl"),
        "rates-others": (rates.others_table, "rates.jsonl"),
    },
    "docs/sharing.md": {
        "datasets": (datasets_tables.arms_table, "datasets-quality.jsonl"),
        "datasets-primary": (datasets_tables.primary_table, "datasets-quality.jsonl"),
        "datasets-size": (
            datasets_tables.sizes_table,
            "datasets-quality.jsonl",
            "datasets-half.jsonl",
            "datasets-coder.jsonl",
        ),
        "tenants": (partial(tenant_tables.sharing_table, "all"), "tenants-quality.jsonl"),
        "bases": (partial(tenant_tables.bases_table, "all"), *TENANTS[1:]),
    },
    "docs/bits.md": {
        "bits": (few_bits.bits_table, "datasets-quality.jsonl"),
        "bits-tried": (few_bits.table_of, "few-bits.jsonl", "datasets-quality.jsonl"),
    },
    "docs/compressing.md": {
        "compress": (partial(tenant_tables.compress_table, tenant_tables.COMPRESSED), "compress-quality.jsonl"),
        "compress-kept": (tenant_tables.kept_table, "compress-quality.jsonl"),
        "datasets-cuts": (datasets_tables.cuts_table, "datasets-quality.jsonl"),
        "strangers": (strangers.table_of, "strangers.json"),
    },
    "docs/cost.md": {
        "bank-bits": (bank_bits.table_of, "bank_bits.json"),
        "calibration": (calibration.table_of, "calibration.json"),
        "devices": (devices.table_of, "devices.json"),
        "many-tenants": (many_tenants.table_of, "many_tenants.jsonl"),
        "served": (served.table_of, "served.json"),
        "served-many": (served_many.table_of, "served_many.json"),
        "tenants-keep": (tenants.keep_table, "tenants.json"),
    },
    "docs/large-models.md": {"large": (by_hand, "large.json"), "large-step": (smollm2.table_of, "coder-half.json")},
    "docs/paper.md": {"outliers": (outliers, "outliers"), "by-size": (rates.size_table, "rates.jsonl")},
    "examples/README.md": {"private": (private, "private.jsonl")},
    "lab/README.md": {
        "gpu": (gpu.table_of, "gpu.json"),
        "tenants-batch": (tenants.batch_table, "tenants.json", "tenants-smollm2.json"),
        "many-training": (many_training.table_of, "many_training.json"),
        "values": (partial(in_order, by_values), "smollm2-values"),
        "one-rate": (one_rate, "smollm2-paper", "smollm2-seeds"),
        "forgetting": (partial(at_rates, "0.01", LORA_1 + ON_ALL), *ENDINGS),
        "low-rates": (partial(at_rates, "0.005", SEARCHED), *REVIEWS),
        "smollm2-speed": (smollm2.table_of, "smollm2.json"),
        "step": (step.table_of, "step.json"),
        "starts": (tenant_tables.starts_table, "sharing-quality.jsonl"),
        "tenants-newcomers": (partial(tenant_tables.sharing_table, "newcomers"), "tenants-quality.jsonl"),
        "bases-newcomers": (partial(tenant_tables.bases_table, "newcomers"), *TENANTS[1:]),
        "datasets-each": (datasets_tables.each_table, "datasets-quality.jsonl"),
        "compress-one-seed": (partial(tenant_tables.compress_table, tenant_tables.ONE_SEED), "compress-quality.jsonl"),
        "smollm2-ablations": (ablations, "smollm2-ablations"),
        "smollm2-stability": (stability, "smollm2-ablations"),
    },
}
"""By page and block: the function that makes it, and its sources."""


# --------------------------------------------------------------------------------------------------------- the pictures

SHOWN = ("FCCA", "RawGrad", "SignGrad", "EVA", "LoRA-XS", "Random", "LoRA, r = 1", "LoRA, r = 16")
"""The methods of the README's figure, in the order of every legend."""


def colour_of(name: str) -> str:
    return figures.NAVY if "LoRA, r" in name else figures.ORANGE


def point_of(runs: Runs, key: str) -> figures.Point:
    """The mean of the seeds, and the standard deviation to both sides."""
    found = [getattr(run, key) for run in runs]
    return figures.Point(fmean(found), fmean(found) - stdev(found), fmean(found) + stdev(found))


def point_apart(others: Runs, runs: Runs, key: str) -> figures.Point:
    """The difference of a method's runs from another's, with its interval."""
    found = paired_difference(scores_by_row(others, key), scores_by_row(runs, key))
    half = found.half or 0.0
    return figures.Point(found.mean, found.mean - half, found.mean + half)


def of_losses(sst2: Runs, hellaswag: Runs) -> str:
    panels = []
    for title, runs in (("SST-2", sst2), ("HellaSwag", hellaswag)):
        methods = grouped(runs, named)
        points = [point_of(methods[name], "held_out_loss") if name in methods else None for name in SHOWN]
        panels.append(figures.Panel(f"loss on {title}, {len(methods['FCCA'])} seeds", points, 3))
    about = "Held-out losses of eight methods on two tasks; the numbers are in the table."
    note = "SmolLM2-135M-Instruct; nats a token, lower is better; mean and standard deviation over the seeds."
    title = "Film reviews: no difference from LoRA found. Endings of stories: LoRA's loss is lower."
    return figures.chart(SHOWN, list(map(colour_of, SHOWN)), panels, title, about, note)


def of_shapes(runs: Runs) -> str:
    shapes = by_values(grouped(runs, named))
    core = shapes.pop("FCCA")
    labels = [f"{values(own)}: {as_core(name).removesuffix(' linear layers')}" for name, own in shapes.items()]
    measures = (
        ("loss, minus the core's", "held_out_loss", 3),
        ("rise on other texts, minus the core's", "forgotten", 2),
    )
    panels = [
        figures.Panel(heading, [point_apart(own, core, key) for own in shapes.values()], digits, True)
        for heading, key, digits in measures
    ]
    about = "Differences of cores and LoRAs from a core of rank 16, by trained values; the numbers are in the table."
    note = "HellaSwag, nats a token; the core of rank 16 has 30,720 values; three seeds, 95 % intervals."
    title = "At equal numbers of values the losses are close, and LoRA forgets more"
    return figures.chart(labels, list(map(colour_of, shapes)), panels, title, about, note)


FORGETTING = {
    "FCCA": figures.ORANGE, "FCCA, all linear layers": "#B35900", "RawGrad": "#882255", "LoRA, r = 1": figures.BLUE,
    "LoRA, r = 16": figures.GREY, "LoRA, r = 1, all linear layers": figures.NAVY,
}  # fmt: skip


def at_point(one: str, runs: Runs) -> tuple[float, str, figures.Point]:
    return mean(runs, "held_out_loss"), f"{1000 * float(one):g}", point_of(runs, "forgotten")


def of_forgetting(*campaigns: Runs) -> str:
    """Loss against forgetting on each task, a line a method over its rates."""
    panels = []
    for task, title in (("hellaswag", "HellaSwag"), ("sst2", "SST-2")):
        found = by_rate(*(runs for runs in campaigns if runs[0].task == task))
        kinds = [
            figures.Kind(name, colour, [at_point(*own) for own in found[name].items()])
            for name, colour in FORGETTING.items()
            if len(found.get(name, ())) > 1
        ]
        panels.append((f"{title}: rise on other texts, nats", kinds))
    about = "What is forgotten against the held-out loss at each learning rate; the numbers are in the tables."
    note = [
        "Methods that were run at several rates. The number at a point is its learning rate in thousandths.",
        "SmolLM2-135M-Instruct, mean of three seeds; bars: standard deviation of the rise over the seeds.",
    ]
    title = "Smaller learning rates forget less, in cores and in LoRAs"
    return figures.planes(panels, "held-out loss, nats a token", title, about, note, of_bytes=False)


def of_serving(in_vllm: Mapping[str, Any]) -> str:
    rates = served.rates_of(in_vllm)
    slots = {name: 1e9 // one["slot_bytes"] for name, one in in_vllm["adapter"].items()}
    bars = {
        served.BASIS: ("cores on a basis model", figures.ORANGE), served.LORA_1: ("LoRAs, r = 1", figures.NAVY),
        served.LORA: ("LoRAs, r = 16", figures.NAVY), served.BASE: ("base model alone", figures.GREY),
    }  # fmt: skip
    order = [who for who in bars if who in rates]
    panels = [
        figures.Panel(heading, [figures.Point(*3 * [found[who]]) if who in found else None for who in order], 0)
        for heading, found in (("tokens a second, 64 tenants", rates), ("slots that fit 1 GB", slots))
    ]
    about = "Tokens a second and slots in a gigabyte in vLLM; the numbers are in the table."
    note = "SmolLM2-135M-Instruct in vLLM on two CPU cores, adapters of rank 16, float32."
    labels, colours = zip(*(bars[who] for who in order), strict=True)
    title = "64 tenants at nine tenths of the base model's speed, eight thousand in a gigabyte"
    return figures.bars(labels, colours, panels, title, about, note)


PICTURES: Mapping[str, tuple[Callable[..., str], *tuple[str, ...]]] = {
    "smollm2": (of_losses, "smollm2-seeds", "smollm2-endings"),
    "values": (of_shapes, "smollm2-values"),
    "forgetting": (of_forgetting, *ENDINGS, "smollm2-endings", *REVIEWS),
    "datasets": (datasets_tables.picture, "datasets-quality.jsonl"),
    "bits": (few_bits.picture, "datasets-quality.jsonl"),
    "tenants": (tenant_tables.losses_picture, TENANTS[0]),
    "served": (of_serving, "served.json"),
}
"""The pictures of docs/figures that show results; the diagrams idea and calibration there are drawn by hand."""


# ------------------------------------------------------------------------------------------------------------ the pages


def block(make: Callable[..., str], *sources: str) -> str:
    """A block with a line that says what it was made from."""
    places = [f"`{'benchmarks' if '.' in name else 'lab'}/results/{name}`" for name in sources]
    return f"{make(*map(source, sources))}\nFrom {(' and ' if len(places) == 2 else ', ').join(places)}.\n"


def rewritten(page: str, blocks: Mapping[str, str]) -> str:
    for name, text in blocks.items():
        marked = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        page, count = marked.subn(lambda found, text=text: found[1] + text + found[2], page)
        if count != 1:
            raise ValueError(f"The page must hold the block {name!r} once, but has it {count} times.")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Write nothing; the status is 1 where a page differs.")
    options, found = parser.parse_args(), dict[Path, str]()
    for page, blocks in BLOCKS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        found[ROOT / page] = rewritten(text, {name: block(*made) for name, made in blocks.items()})
    for name, (make, *sources) in PICTURES.items():
        found[ROOT / "docs" / "figures" / f"{name}.svg"] = make(*map(source, sources))
    different = [page for page, text in found.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    for page in different if not options.check else ():
        page.write_text(found[page], encoding="utf-8")
    print(f"Not up to date: {', '.join(page.name for page in different) or 'nothing'}.")
    return int(options.check and bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
