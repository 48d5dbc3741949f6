"""Training 32 tenants at once against one after the other: processor seconds of a tenant's step.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/many_training.py       # about half an hour;  --quick: tiny sizes

- ``together``: 32 tenants in one training, :func:`train_many`.
- ``one after the other``: one of them by the one-run recipe, :func:`train`, the Trainer and its set-up included; the
  same of PEFT's LoRA; and ours in a ``bare loop`` without a Trainer: what a step costs alone at the least.
- ``floor``: forward and backward of the frozen base on the same rows in the same batches, with no adapter. Its input
  embeddings require a gradient, so that it flows through every layer.

Rows have 20 to 60 tokens, the last quarter of which is the completion; a tenant's step holds one of them or eight. The
contestants take turns; a round divides each by ``together`` of that round. Rank 16 on the attention projections,
float32.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from contestants import UNCALIBRATED, adapter_config, random_qwen2
from frozencore.tune.many.tenant import Tenant, train_many
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, row_costs
from frozencore.tune.scoring.forward import row_losses, row_sizes
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import group_by_length, overhead_tokens_of
from harness import load_average, medians, parser_of, ratios, table, with_range, write_found

TOGETHER, ALONE, BARE, FLOOR = "together", "one after the other", "in a bare loop", "floor"
LORA = "LoRA one after the other"
CONTESTANTS = (TOGETHER, FLOOR, ALONE, BARE, LORA)
SHORTEST, LONGEST = 20, 60


@dataclass(frozen=True)
class Setting:
    """The rows of a tenant's step, and the steps of each contestant.

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


def adapted(base: nn.Module, contestant: str) -> nn.Module:
    return get_peft_model(deepcopy(base), adapter_config(contestant))


def bare_loop(model: nn.Module, tenant: Tenant) -> None:
    trained, collate = [p for p in model.parameters() if p.requires_grad], PaddingCollator(0)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    for step in range(tenant.num_steps):
        rows = tenant.step_rows(step)
        (row_losses(model, collate(rows)).sum() / sum(row.num_targets for row in rows)).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def pass_through(base: nn.Module, tenants: dict[str, Tenant], num_steps: int) -> None:
    collate = PaddingCollator(0)
    for step in range(num_steps):
        rows = [row for tenant in tenants.values() for row in tenant.step_rows(step)]
        for group in group_by_length(*row_costs(row_sizes(base, rows), torch.device("cpu")), overhead_tokens_of(base)):
            row_losses(base, collate([rows[i] for i in group])).sum().backward()
        base.zero_grad()


def race(name: str, base: nn.Module, setting: Setting, rounds: int) -> dict[str, Any]:
    """Seconds of a tenant's step, by contestant, and each over ``together`` of the same round."""
    vocabulary = base.config.vocab_size
    short, long = (draw_tenants(setting, n, vocabulary) for n in (setting.steps_together, setting.steps_alone))
    ours, lora, floor = adapted(base, UNCALIBRATED), adapted(base, "lora"), deepcopy(base).requires_grad_(False).train()
    floor.enable_input_require_grads()

    num_together = setting.num_tenants * setting.steps_together
    times: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    for turn in range(rounds + 1):
        one = long[f"tenant {turn % setting.num_tenants}"]
        work: dict[str, tuple[Callable[[], object], int]] = {
            TOGETHER: (
                partial(train_many, ours, short, {}.update, pad_id=0, num_slots=setting.num_tenants),
                num_together,
            ),
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
        "tenant_step_s": medians(times),
        "over_together": {contestant: ratios(own, times[TOGETHER]) for contestant, own in times.items()},
    }


def table_of(found: Mapping[str, Any]) -> str:
    """A tenant's step together, and by every other way over that."""
    together, *others = found["rows"][0]["tenant_step_s"]
    rows = [
        [row["model"], str(row["rows_a_step"]), f"{1e3 * row['tenant_step_s'][together]:.1f} ms",
         *(with_range(row["over_together"][name]) for name in others)]
        for row in found["rows"]
    ]  # fmt: skip
    return table(["model", "rows a step", together, *others], rows)


def main() -> None:
    parser = parser_of(__doc__, "many_training")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.quick:
        small = random_qwen2(2, 64, heads=4, vocabulary=64).eval()
        rows = [race("2 x 64", small, Setting(3, per, 2, 2), 1) for per in (1, 2)]
    else:
        pocket = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
        bases = {"pocket": pocket, "8 x 512": random_qwen2(8, 512, vocabulary=8192).eval()}
        rows = [race(name, base, setting, options.rounds) for name, base in bases.items() for setting in SETTINGS[name]]
    print(table_of({"rows": rows}))
    write_found(options, rounds=options.rounds, rows=rows)


if __name__ == "__main__":
    main()
