"""Tables of docs/cost.md and sentences of the README on speed: targets, steps, calibration, SVD, memory, GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from statistics import median
from textwrap import fill
from typing import Any

from harness import table, with_quartiles
from targets import calibration_by_width

Found = Mapping[str, Any]
NAMES = {"floor": "no adapter", "lora": "LoRA", "dora": "DoRA", "pissa": "PiSSA", "frozencore": "frozencore"}


def blocks(machine: Found, gpu_found: Found) -> dict[str, str]:
    """The blocks of docs/cost.md by name that these tables are."""
    parts = machine["parts"]
    return {
        "targets": targets(machine),
        "contest": steps(parts["step"]),
        "calibrations": calibrations([*parts["calibration"]["rows"], *parts["calibration_eva"]["rows"]]),
        "svds": svds(parts["svd"]),
        "memory": memory(parts["memory"]),
        "gpu": gpu(gpu_found),
        "gpu-more": gpu_more(gpu_found),
    }


def targets(machine: Found) -> str:
    marks = {True: "reached", False: "missed", None: "not measured"}
    rows = [[row["what"], row["target"], row["measured"], marks[row["is_reached"]]] for row in machine["targets"]]
    return table(["what", "target", "measured", ""], rows)


def steps(step: Found) -> str:
    """Over the floor, median with quartiles, in every setting; and what is kept for the backward pass."""
    settings = list(dict.fromkeys((row["targets"], row["num_rows"], row["num_tokens"]) for row in step["rows"]))
    rows = []
    for contestant, name in NAMES.items():
        own = [row for row in step["rows"] if row["contestant"] == contestant]
        ratios = [with_quartiles(row["over_floor"], ".3f") for row in own]
        rows.append([name, *ratios, " / ".join(f"{row['saved_over_floor']:+.1%}" for row in (own[0], own[-1]))])
    headings = [f"{targets}, {num_rows} x {num_tokens}" for targets, num_rows, num_tokens in settings]
    return table(["", *headings, "kept activations, attention / all linear"], rows)


def calibrations(rows: Iterable[Found]) -> str:
    logits = {True: "all", False: "of completions"}
    body = [
        [row["contestant"], logits[row["contestant"].startswith(("PEFT", "floor, all"))], f"{row['median_s']:.1f}"]
        for row in rows
    ]
    return table(["", "logits", "s"], body)


def svds(svd: Found) -> str:
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in svd["rows"]))
    found = {(tuple(row["shape"]), row["method"]): row for row in svd["rows"]}
    methods = list(dict.fromkeys(row["method"] for row in svd["rows"]))

    def cell(shape: tuple[int, ...], method: str) -> str:
        row = found.get((shape, method))
        return f"{1e3 * median(row['runs_s']):,.0f} ms, {row['cosine']:.6f}" if row else ""

    body = [[f"{m:,} x {n:,}", *(cell((m, n), method) for method in methods)] for m, n in shapes]
    return table(["shape", *methods], body)


def memory(found: Found) -> str:
    body = [
        [
            f"{row['hidden']:,} / {row['intermediate']:,}, {row['layers']}",
            row["budget"],
            f"{row['passes']}{', sketches' if row['streaming'] else ''}",
            f"{row['taken'] / 2**20:,.0f} MiB",
            f"{row['share']:.2f}",
        ]
        for row in found["rows"]
    ]
    return table(["widths, blocks", "budget", "passes", "taken", "of the budget"], body)


def gpu(found: Found) -> str:
    """Every model's race; in brackets the paper's figures, of an H20."""
    body = []
    for model, sections in found["models"].items():
        for racer, row in measured(sections, "race").items():
            paper = found["paper_h20"].get(racer, (None,) * 3) if model == "Qwen2.5-3B" else (None,) * 3
            start_s = sections.get("full PiSSA", {}).get("init_s") if racer == "pissa" else row.get("calibration_s")
            body.append([
                model, NAMES[racer], _beside(start_s, paper[0], "{:.1f}"), f"{1e3 * row['step_s']:.0f}",
                _beside(row["accumulated_s"], paper[1], "{:.2f}"),
                _beside((row["accumulated_peak_bytes"] or 0) / 1e9, paper[2], "{:.3f}"), f"{row['num_trainable']:,}",
            ])  # fmt: skip
    headings = ["model", "", "start, s", "1 x 512, ms", "8 x (1 x 128), s", "peak, GB", "trained values"]
    return table(headings, body)


def measured(sections: Found, name: str) -> Found:
    """A section's findings; nothing where it failed, was skipped, or was not asked for."""
    found = sections.get(name, {})
    return {} if "error" in found or "skipped" in found else found


def gpu_more(found: Found) -> str:
    """Steps without launching, compiled steps, and many tenants: of each model what was measured."""
    body: list[list[str]] = []
    for model, sections in found["models"].items():
        graphs, compiled = (measured(sections, name) for name in ("CUDA graphs", "compile"))
        body += _step_row(model, "step as a CUDA graph, ms", graphs)
        body += _step_row(model, f"compiled step of {compiled.get('blocks')} blocks, ms", compiled)
        together = measured(sections, "trained together")
        for name, row in together.items():
            if name.endswith("together"):
                ours, lora = (1e3 * together[f"{who} alone"]["tenant_step_s"] for who in ("frozencore", "LoRA"))
                cells = [
                    f"{1e3 * together['floor'][name]:.1f}", f"{1e3 * row['tenant_step_s']:.1f} (alone {ours:.1f})",
                    f"(alone {lora:.1f})",
                ]  # fmt: skip
                body.append([model, f"a tenant's step, {name}, ms", *cells, ""])
        batch = measured(sections, "one batch")
        for what, unit, times in (("forward", "ms", 1e3), ("generate", "s", 1)) if batch else ():
            cells = [f"{times * batch[who][f'{what}_s']:.2f}" for who in ("base", "bank of cores")]
            body.append([model, f"{what} {batch['tenants']} rows of as many tenants, {unit}", *cells, "", ""])
    if not body:
        return "Not measured yet.\n"
    return f"{gpu_targets(found)}\n{table(['model', '', 'no adapter', 'frozencore', 'LoRA', 'DoRA'], body)}"


GPU_TARGETS: list[tuple[str, float, Callable[[Found], float]]] = [
    ("step as a CUDA graph / floor", 1.06, lambda of: _over(of["CUDA graphs"], "frozencore", "floor")),
    ("step as a CUDA graph / LoRA", 0.80, lambda of: _over(of["CUDA graphs"], "frozencore", "lora")),
    ("compiled step / LoRA", 1.00, lambda of: _over(of["compile"], "frozencore", "lora")),
    ("eager step / LoRA", 0.90, lambda of: _over(of["race"], "frozencore", "lora")),
    ("calibration / plain pass of the same logits", 1.50,
     lambda of: _over(of["race"], "frozencore", "floor", "calibration_s")),
    ("forward of 64 tenants / base model", 1.10,
     lambda of: _over(of["one batch"], "bank of cores", "base", "forward_s")),
    ("generating of 64 tenants / base model", 1.10,
     lambda of: _over(of["one batch"], "bank of cores", "base", "generate_s")),
    ("a step of 32 tenants together / alone", 0.25,
     lambda of: _over(of["trained together"], "32 together", "frozencore alone", "tenant_step_s")),
]  # fmt: skip


def _over(found: Found, ours: str, theirs: str, what: str = "step_s") -> float:
    return found[ours][what] / found[theirs][what]


def gpu_targets(found: Found) -> str:
    """The targets on a GPU and the values that each model reached, missed targets first."""
    body = []
    for what, limit, measure in GPU_TARGETS:
        reached: dict[str, float] = {}
        for model, sections in found["models"].items():
            with suppress(KeyError):
                reached[model] = measure({name: measured(sections, name) for name in sections})
        cells = [f"{reached[model]:.3f}" if model in reached else "" for model in found["models"]]
        if reached:
            verdict = "missed" if max(reached.values()) > limit else "reached"
            body.append([what, f"<= {limit:g}", *cells, verdict])
    return table(["what", "target", *found["models"], ""], sorted(body, key=lambda row: row[-1] != "missed"))


def _step_row(model: str, what: str, found: Found) -> list[list[str]]:
    names = ("floor", "frozencore", "lora", "dora")
    cells = [f"{1e3 * found[name]['step_s']:.1f}" if name in found else "" for name in names]
    return [[model, what, *cells]] if found else []


def _beside(measured: float | None, paper: float | None, form: str) -> str:
    text = "" if measured is None else form.format(measured)
    return f"{text} [{paper:g}]" if paper is not None else text


def _spread(races: Mapping[str, Found]) -> float:
    """The largest difference between two rounds of frozencore's or LoRA's step, over the smaller of them."""
    pairs = [
        [run["accumulated_s"] for run in race[name]["runs"]]
        for race in races.values()
        for name in ("frozencore", "lora")
    ]
    return max(max(times) / min(times) - 1 for times in pairs)


def sentences(machine: Found, gpu: Found) -> str:
    """The README's sentences on speed."""
    step, device = machine["parts"]["step"]["rows"], gpu["device"]
    ours, lora = ([row for row in step if row["contestant"] == name] for name in ("frozencore", "lora"))
    reached = {row["what"]: row["measured"] for row in machine["targets"]}
    races = {model: sections["race"] for model, sections in gpu["models"].items()}
    race = races["Qwen2.5-3B"]
    peak = {name: f"{row['accumulated_peak_bytes'] / 1e9:.2f}" for name, row in race.items()}
    steps_s = "; ".join(
        f"{model} {race['frozencore']['accumulated_s']:.2f} (LoRA {race['lora']['accumulated_s']:.2f})"
        for model, race in races.items()
    )
    slower = " and ".join(
        model for model, of in races.items() if of["frozencore"]["accumulated_s"] > of["lora"]["accumulated_s"]
    )
    over_lora = [f"{row['over_lora'][0]:.3f}" for row in ours]
    growth = machine["parts"]["growth"]
    over_floor = calibration_by_width(growth)
    narrow, wide = min(over_floor), max(over_floor)
    eva, lora_ga = (1 / float(reached[f"calibration / PEFT {name}"]) for name in ("EVA", "LoRA-GA"))
    points = (
        f"**A training step** (8 layers of width 512, float32, one CPU core, `make bench`) took {over_lora[0]} and "
        f"{over_lora[1]} times as long as with PEFT's LoRA on the attention projections (4 x 128 and 1 x 512 tokens), "
        f"and {over_lora[2]} and {over_lora[3]} times as long on all linear layers. These are medians of "
        f"{machine['parts']['step']['rounds']} rounds; the quartiles lie a few hundredths away. A core adds "
        f"{ours[0]['saved_over_floor']:.1%} (attention) and {ours[-1]['saved_over_floor']:.1%} (all linear) to the "
        f"activations kept for the backward pass; LoRA adds {lora[0]['saved_over_floor']:.0%} and "
        f"{lora[-1]['saved_over_floor']:.0%}.",
        f"**Calibration** on {growth['plan']['job']['num_examples']} examples, SVDs included, takes "
        f"{over_floor[narrow]:.3f} times (width {narrow}) to {over_floor[wide]:.3f} times (width {wide}) as long as a "
        f"plain forward and backward pass that computes the same logits (medians of {growth['runs']} runs). At width "
        f"512 PEFT's LoRA-GA takes {lora_ga:.2f} times and its EVA {eva:.1f} times as long as ours. Both also compute "
        f"the logits of prompts; ours does not.",
        f"**On one {device}** (bfloat16, random weights, `benchmarks/gpu.py`, medians of 2 rounds) a step of eight "
        f"rows of 128 tokens took, in seconds: {steps_s}. On {slower} LoRA is faster; the two rounds of one model "
        f"differ by up to {_spread(races):.0%}. The peak memory at Qwen2.5-3B is {peak['frozencore']} GB "
        f"(LoRA {peak['lora']}, DoRA {peak['dora']}, no adapter {peak['floor']}). Calibration there takes "
        f"{race['frozencore']['calibration_s']:.1f} s, a plain pass {race['floor']['calibration_s']:.1f} s "
        f"([what it costs](docs/cost.md)).",
    )
    return "\n".join(fill(f"- {point}", 120, subsequent_indent="  ", break_on_hyphens=False) for point in points) + "\n"


def smollm2(found: Found) -> str:
    """A real model's step, scoring and calibration, and where the seconds before a command's training go."""
    names = {"step": "training step, 8 rows", "scoring": "scoring 64 rows", "calibration": "calibration, 128 rows"}
    body = [
        [dtype, names[what], NAMES[who], f"{row['processor_s']:.2f} s",
         *(with_quartiles(row[over], ".3f") if over in row else "" for over in ("over_floor", "over_lora")),
         f"{row['memory_bytes'] / 1e6:,.0f} MB"]
        for dtype, parts in found["dtypes"].items()
        for what, rows in parts.items()
        for who, row in rows.items()
    ]  # fmt: skip
    stages = [[row["stage"], f"{row['processor_s']:.1f} s"] for row in found["waterfall"]]
    headings = ["weights", "what", "", "processor", "over no adapter", "over LoRA", "memory above the model"]
    return f"{table(headings, body)}\n{table(['until this stage ends', 'processor'], stages)}"
