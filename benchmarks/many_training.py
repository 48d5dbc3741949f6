"""Training 32 tenants at once against one after the other: processor seconds of a tenant's step.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/many_training.py       # about half an hour;  --quick: tiny sizes
    python benchmarks/many_training.py --page        # the tables of docs/many-cores.md from the results, nothing run

- ``together``: 32 tenants in one training, :func:`train_many`.
- ``one after the other``: one of them by the one-run recipe, :func:`train`, the Trainer and its set-up included; the
  same of PEFT's LoRA; and ours in a ``bare loop`` without a Trainer: what a step costs alone at the least.
- ``floor``: forward and backward of the frozen base on the same rows in the same batches, with no adapter. Its input
  embeddings require a gradient, so that it flows through every layer.

Rows have 20 to 60 tokens, the last quarter of which is the completion; a tenant's step holds one of them or eight. The
contestants take turns; a round divides each by ``together`` of that round. Rank 16 on the attention projections,
float32. ``growth`` is the cost of a step with more and more tenants, at one row each, on the pocket model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from frozencore.files.whole_file import write_json, write_text
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.batches import PaddingCollator, row_costs
from frozencore.tune.run.provenance import provenance
from frozencore.tune.training.by_length import group_by_length, pass_tokens_of
from frozencore.tune.training.many.losses import num_targets, row_losses, row_sizes
from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from machine import load_average, machine_name
from tenants import ATTENTION, RANK, quartiles, qwen2

RESULTS = Path(__file__).parent / "results" / f"many-training-{machine_name()}.json"
PAGE = Path(__file__).parents[1] / "docs" / "many-cores.md"
TOGETHER, ALONE, BARE, LORA, FLOOR = (
    "together",
    "one after the other",
    "in a bare loop",
    "LoRA one after the other",
    "floor",
)
CONTESTANTS = (TOGETHER, FLOOR, ALONE, BARE, LORA)
SHORTEST, LONGEST = 20, 60


@dataclass(frozen=True)
class Setting:
    """How many rows a tenant's step holds, and how many steps each contestant trains.

    They are a few where all tenants train, more of a single one, so that the set-up weighs no more than in real use.
    """

    num_tenants: int
    rows_a_step: int
    steps_together: int
    steps_alone: int


SETTINGS = {
    "pocket": (Setting(32, 1, 12, 32), Setting(32, 8, 3, 8)),
    "8 x 512": (Setting(32, 1, 3, 32), Setting(32, 8, 1, 8)),
}
GROWTH = (1, 2, 4, 8, 16, 32, 64, 128)


def draw_rows(num_rows: int, seed: int, vocabulary: int) -> list[TokenRow]:
    drawn = random.Random(seed)
    rows = []
    for i in range(num_rows):
        length = drawn.randint(SHORTEST, LONGEST)
        rows.append(TokenRow(f"row-{i}", [drawn.randrange(3, vocabulary) for _ in range(length)], 3 * length // 4))
    return rows


def draw_tenants(setting: Setting, num_steps: int, vocabulary: int) -> dict[str, Tenant]:
    recipe = Recipe(learning_rate=1e-3, warmup=0.1, batch_size=setting.rows_a_step, accumulation=1)
    num_rows = num_steps * setting.rows_a_step
    return {f"tenant {i}": Tenant(draw_rows(num_rows, i, vocabulary), recipe) for i in range(setting.num_tenants)}


def adapted(base: nn.Module, method: str) -> nn.Module:
    return METHODS[method].add(deepcopy(base), AdapterOptions(RANK, tuple(ATTENTION), seed=0, core={}))


def bare_loop(model: nn.Module, tenant: Tenant) -> None:
    trained, collate = [p for p in model.parameters() if p.requires_grad], PaddingCollator(0)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    for step in range(tenant.num_steps):
        rows = tenant.step_rows(step)
        (row_losses(model, collate(rows)).sum() / sum(map(num_targets, rows))).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def pass_through(base: nn.Module, tenants: dict[str, Tenant], num_steps: int) -> None:
    collate = PaddingCollator(0)
    for step in range(num_steps):
        rows = [row for tenant in tenants.values() for row in tenant.step_rows(step)]
        for group in group_by_length(*row_costs(row_sizes(base, rows), torch.device("cpu")), pass_tokens_of(base)):
            row_losses(base, collate([rows[i] for i in group])).sum().backward()
        base.zero_grad()


def race(name: str, base: nn.Module, setting: Setting, rounds: int) -> dict[str, Any]:
    """Seconds of a tenant's step, by contestant, and each over ``together`` of the same round."""
    vocabulary = base.config.vocab_size
    short, long = (draw_tenants(setting, n, vocabulary) for n in (setting.steps_together, setting.steps_alone))
    ours, lora, floor = adapted(base, "random"), adapted(base, "lora"), deepcopy(base).requires_grad_(False).train()
    floor.enable_input_require_grads()

    num_together = setting.num_tenants * setting.steps_together
    times: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    for turn in range(rounds + 1):
        one = long[f"tenant {turn % setting.num_tenants}"]
        work: dict[str, tuple[Callable[[], object], int]] = {
            TOGETHER: (partial(train_many, ours, short, pad_id=0, num_slots=setting.num_tenants), num_together),
            ALONE: (partial(train, ours, one.rows, one.recipe, pad_id=0), setting.steps_alone),
            BARE: (partial(bare_loop, ours.train(), one), setting.steps_alone),
            FLOOR: (partial(pass_through, floor, short, setting.steps_together), num_together),
            LORA: (partial(train, lora, one.rows, one.recipe, pad_id=0), setting.steps_alone),
        }
        for contestant, (run, num_steps) in work.items():
            started = time.process_time()
            run()
            if turn:  # the first warms up
                times[contestant].append((time.process_time() - started) / num_steps)
    return {
        "model": name,
        **vars(setting),
        "load": load_average(),
        "tenant_step_s": {contestant: median(own) for contestant, own in times.items()},
        "over_together": {
            contestant: quartiles([a / b for a, b in zip(own, times[TOGETHER], strict=True)])
            for contestant, own in times.items()
        },
    }


def growth(base: nn.Module, counts: tuple[int, ...], num_steps: int, rounds: int) -> list[dict[str, float]]:
    """Seconds of a tenant's step with more and more tenants at once."""
    model, times = adapted(base, "random"), {count: [] for count in counts}
    for turn in range(rounds + 1):
        for count in counts:
            tenants = draw_tenants(Setting(count, 1, num_steps, 0), num_steps, base.config.vocab_size)
            started = time.process_time()
            train_many(model, tenants, pad_id=0, num_slots=count)
            if turn:
                times[count].append((time.process_time() - started) / (count * num_steps))
    return [{"tenants": count, "tenant_step_s": median(own)} for count, own in times.items()]


def tables(result: dict[str, Any]) -> str:
    """The generated block of the page."""
    lines = [
        "| model | rows a step | " + " | ".join(CONTESTANTS) + " |",
        "|---" * (2 + len(CONTESTANTS)) + "|",
    ]
    for row in result["rows"]:
        cells = [f"{1e3 * row['tenant_step_s'][TOGETHER]:.1f} ms"]
        for contestant in CONTESTANTS[1:]:
            middle, low, high = row["over_together"][contestant]
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {row['model']} | {row['rows_a_step']} | " + " | ".join(cells) + " |")
    lines += ["", "| tenants at once | " + " | ".join(str(row["tenants"]) for row in result["growth"]) + " |"]
    lines.append("|---" * (len(result["growth"]) + 1) + "|")
    steps = [f"{1e3 * row['tenant_step_s']:.1f}" for row in result["growth"]]
    lines.append("| a tenant's step, ms | " + " | ".join(steps) + " |")
    loads = sorted({row["load"] for row in result["rows"]})
    lines += ["", f"Measured while {loads[0]:.0f} to {loads[-1]:.0f} programs wanted the two cores: ratios, not times."]
    return "\n".join(lines)


def write_page(result: dict[str, Any], page: Path) -> None:
    between = re.compile(r"(?<=<!-- many-training:begin -->\n).*?(?=<!-- many-training:end -->)", re.DOTALL)
    write_text(page, between.sub(lambda _: tables(result) + "\n", page.read_text(encoding="utf-8")))


def show(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        table = Table("", "a tenant's step", "over together", title=f"{row['model']}, {row['rows_a_step']} rows a step")
        for contestant, (middle, low, high) in row["over_together"].items():
            seconds = row["tenant_step_s"][contestant]
            table.add_row(contestant, f"{1e3 * seconds:.1f} ms", f"{middle:.2f} ({low:.2f} to {high:.2f})")
        Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Two narrow layers, few tenants: does it run?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true", help="Write the tables of the page from the results.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(options.out.read_text()), PAGE)
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.quick:
        small = qwen2(2, 64, 4, 2, feed_forward=128, vocabulary=64)
        rows = [race("2 x 64", small, Setting(3, per, 2, 2), 1) for per in (1, 2)]
        grown = growth(small, (1, 3), 2, 1)
    else:
        pocket = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
        bases = {"pocket": pocket, "8 x 512": qwen2(8, 512, 8, 2, feed_forward=1408, vocabulary=8192)}
        rows = [race(name, base, setting, options.rounds) for name, base in bases.items() for setting in SETTINGS[name]]
        grown = growth(pocket, GROWTH, 6, options.rounds)
    result = {
        "benchmark": "many-training", "quick": options.quick, "rounds": options.rounds, "rows": rows, "growth": grown,
        "provenance": provenance(),
    }  # fmt: skip
    show(result)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
