"""Many tenants of one basis on a GPU, sections of benchmarks/gpu.py: in one training, and in one batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from contestants import FLOOR, UNCALIBRATED, Stepper, completion_batch
from frozencore import CoreBank, frozen_core_layers
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import Recipe
from gpu_sections import Bench, Found, peak_memory, repeated
from harness import wall_s

PROMPT_TOKENS, NEW_TOKENS = 32, 32


def trained_together(bench: Bench) -> Found:
    """Seconds of a tenant's step at one row, of many tenants at once and of one alone in a bare loop; peaks."""
    job, row = bench.job, completion_batch(bench.ids(1, bench.job.short))
    found: Found = {"rows_a_step": 1, "tokens": job.short}
    with bench.adapted(FLOOR) as model:
        batches = {count: completion_batch(bench.ids(count, job.short)) for count in job.trained_tenants}
        found[FLOOR] = {
            f"{count} together": repeated(lambda b=b: model(**b).loss.backward(), job.repeats) / count
            for count, b in batches.items()
        }
    for name, contestant in (("frozencore alone", UNCALIBRATED), ("LoRA alone", "lora")):
        with bench.adapted(contestant) as model:
            stepper = Stepper(model)
            stepper.step(row)
            found[name] = {"tenant_step_s": repeated(lambda s=stepper: s.step(row), job.repeats)}
    for count in job.trained_tenants:
        with bench.adapted(UNCALIBRATED) as model:
            train_many(model, _tenants(bench, count, 1), pad_id=0, num_slots=count)
            one: Found = {}
            with peak_memory(one, "peak_bytes"):
                work = _tenants(bench, count, job.tenant_steps)
                all_s = wall_s(lambda m=model, w=work, n=count: train_many(m, w, pad_id=0, num_slots=n))
            found[f"{count} together"] = one | {"tenant_step_s": all_s / count / job.tenant_steps}
    return found


def _tenants(bench: Bench, count: int, num_steps: int) -> dict[str, Tenant]:
    length = bench.job.short
    recipe = Recipe(learning_rate=1e-3, warmup=0.1, batch_size=1, accumulation=1)
    ids = bench.ids(count * num_steps, length).view(count, num_steps, length).tolist()
    rows = [[TokenRow(f"{i}", one, 3 * length // 4) for i, one in enumerate(own)] for own in ids]
    return {f"tenant {i}": Tenant(own, recipe) for i, own in enumerate(rows)}


def one_batch(bench: Bench) -> Found:
    """A row for each tenant, forward and generated: the base model, and a bank of cores."""
    ids = bench.ids(bench.job.served_tenants, min(PROMPT_TOKENS, bench.job.short))
    found: Found = {"tenants": len(ids), "base": _forward_and_generate(bench, bench.base.eval(), ids, nullcontext)}
    names = [f"t{i}" for i in range(len(ids))]
    with bench.adapted(UNCALIBRATED) as model:
        bank = CoreBank(model.eval(), len(ids))
        for name in names:
            layers = frozen_core_layers(model, "default")
            bank.put(name, {key: 0.02 * torch.randn_like(layer.factors("default")[2]) for key, layer in layers.items()})
        found["bank of cores"] = _forward_and_generate(bench, model, ids, lambda: bank.rows(names))
    return found


@torch.no_grad()
def _forward_and_generate(
    bench: Bench, model: Any, ids: Tensor, around: Callable[[], AbstractContextManager[None]]
) -> Found:
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    new = min(NEW_TOKENS, bench.job.short)
    tokens = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def forward() -> None:
        with around():
            model(**rows)

    def generate() -> None:
        with around():
            model.generate(**rows, **tokens)

    return {"forward_s": repeated(forward, bench.job.repeats), "generate_s": repeated(generate, 2)}
