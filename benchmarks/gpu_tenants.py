"""Many tenants of one basis, as benchmarks/gpu.py measures them: in one training, and in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from frozencore import CoreBank, frozen_core_layers
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.many.train import train_many
from frozencore.tune.training.recipe import Recipe
from gpu_contest import UNCALIBRATED, Bench, Stepper, adapted, peak_memory, peft_config, timed

Found = dict[str, Any]
PROMPT_TOKENS, NEW_TOKENS = 32, 32


def trained_together(bench: Bench) -> Found:
    """Seconds of a tenant's step at one row, of so many tenants at once, and of one alone in a bare loop; peaks."""
    job = bench.job
    (row,) = bench.batches(1, 1, job.short, shifted=False)
    found: Found = {"rows_a_step": 1, "tokens": job.short}
    with adapted(bench, "floor") as model:
        found["floor"] = _passes(bench, model)
    for name, contestant in (("frozencore alone", UNCALIBRATED), ("LoRA alone", "lora")):
        with adapted(bench, contestant) as model:
            stepper = Stepper(model)
            times = [timed(bench.device, lambda stepper=stepper: stepper.step([row])) for _ in range(job.repeats + 2)]
            found[name] = {"tenant_step_s": median(times[2:])}
    for count in job.trained_tenants:
        with adapted(bench, UNCALIBRATED) as model:
            train_many(model, _tenants(bench, count, 1), pad_id=0, num_slots=count)
            one: Found = {}
            with peak_memory(bench.device, one, "peak_bytes"):
                work = _tenants(bench, count, job.tenant_steps)
                all_s = timed(bench.device, lambda m=model, w=work, n=count: train_many(m, w, pad_id=0, num_slots=n))
            found[f"{count} together"] = one | {"tenant_step_s": all_s / count / job.tenant_steps}
    return found


def _tenants(bench: Bench, count: int, num_steps: int) -> dict[str, Tenant]:
    """Rows of the length of ``Job.short``, as long as calibration's."""
    length = bench.job.short
    recipe = Recipe(learning_rate=1e-3, warmup=0.1, batch_size=1, accumulation=1)
    ids = torch.randint(3, bench.base.config.vocab_size, (count, num_steps, length)).tolist()
    rows = [[TokenRow(f"{i}", one, 3 * length // 4) for i, one in enumerate(own)] for own in ids]
    return {f"tenant {i}": Tenant(own, recipe) for i, own in enumerate(rows)}


def _passes(bench: Bench, model: nn.Module) -> Found:
    """Forward and backward of the frozen base on rows of as many tenants, in one batch."""
    found = {}
    for count in bench.job.trained_tenants:
        (batch,) = bench.batches(1, count, bench.job.short, shifted=True)
        times = [timed(bench.device, lambda b=batch: model(**b).loss.backward()) for _ in range(bench.job.repeats + 1)]
        found[f"{count} together"] = median(times[1:]) / count
    return found


def one_batch(bench: Bench) -> Found:
    """A row for each tenant, forward and generated: the base model, and a bank of cores."""
    ids = _prompts(bench)
    found: Found = {"tenants": len(ids), "base": _forward_and_generate(bench, bench.base.eval(), ids, {}, nullcontext)}
    names = [f"t{i}" for i in range(len(ids))]
    with adapted(bench, UNCALIBRATED) as model:
        bank = CoreBank(model.eval(), len(ids))
        for name in names:
            bank.put(
                name, {layer: 0.02 * torch.randn_like(part.factors("default")[2]) for layer, part in _cores(model)}
            )

        @contextmanager
        def through() -> Iterator[None]:
            with bank.rows(names):
                yield

        found["bank of cores"] = _forward_and_generate(bench, model, ids, {}, through)
    return found


def lora_batch(bench: Bench) -> Found:
    """The same through PEFT's LoRA, an adapter for each row; putting them on takes longer than all else."""
    ids = _prompts(bench)
    with adapted(bench, "lora") as model:
        for i in range(1, len(ids)):
            model.add_adapter(f"t{i}", deepcopy(peft_config("lora")))
        names = ["default", *(f"t{i}" for i in range(1, len(ids)))]
        model.eval()
        return {
            "tenants": len(ids),
            "LoRA adapter_names": _forward_and_generate(bench, model, ids, {"adapter_names": names}, nullcontext),
        }


def _cores(model: nn.Module) -> list[tuple[str, Any]]:
    return list(frozen_core_layers(model, "default").items())


def _prompts(bench: Bench) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = bench.job.served_tenants, min(PROMPT_TOKENS, bench.job.short)
    return torch.randint(3, bench.base.config.vocab_size, shape, generator=generator).to(bench.device)


@torch.no_grad()
def _forward_and_generate(
    bench: Bench, model: Any, ids: Tensor, options: Found, around: Callable[[], AbstractContextManager[None]]
) -> Found:
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    new = min(NEW_TOKENS, bench.job.short)
    tokens = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def forward() -> None:
        with around():
            model(**rows, **options)

    def generate() -> None:
        with around():
            model.generate(**rows, **options, **tokens)

    found = {}
    for what, run, repeats in (("forward_s", forward, bench.job.repeats), ("generate_s", generate, 2)):
        found[what] = median([timed(bench.device, run) for _ in range(repeats + 1)][1:])
    return found
