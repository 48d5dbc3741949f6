"""The cost of a tenant: bytes on disk, memory and loading time, and a batch of 64 rows of 64 tenants.

    OMP_NUM_THREADS=1 python benchmarks/tenants.py             # about ten minutes;  --quick: tiny sizes
    OMP_NUM_THREADS=1 python benchmarks/tenants.py --smollm2   # the batch on a real model, about ten minutes

``keep``: the attention shapes of Qwen2.5-3B (36 layers, 2048 wide, 256-wide keys and values, bfloat16; feed-forward
and vocabulary, which hold no adapter, are left small), rank 16, all four projections. A tenant is a core in a bank, an
adapter of cores alone, an adapter that holds its basis, or PEFT's LoRA of rank 16. The memory is what the process's
resident set grows by, times are processor seconds. A bank is filled from a hundred files, over and over: what is read
is in the system's cache.

``batch``: 64 rows of 32 tokens, each of its own tenant: one forward pass, and 32 generated tokens. The base model
without adapters, our bank, our ``adapter_names``, PEFT's LoRA with ``adapter_names``, and LoRA of one tenant merged
(which cannot serve the others). They take turns; each time is divided by the base model's of the same round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from contestants import UNCALIBRATED, adapter_config, random_ids, random_qwen2
from frozencore import CoreBank, frozen_core_layers, get_core, load_basis, save_basis, set_basis
from frozencore.tune.locate import smollm2_path
from frozencore.tune.pocket import pocket_model_path
from harness import cpu_s, load_average, medians, parser_of, ratios, table, take_turns, with_range, write_found

NUM_FILES = 100
NEW_TOKENS, PROMPT_TOKENS = 32, 32


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def draw_cores(model: nn.Module, adapter_name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in frozen_core_layers(model, adapter_name).values():
            R = layer.factors(adapter_name)[2]
            R.copy_(0.02 * torch.randn(R.shape, generator=generator))


def on_a_basis(base: nn.Module, folder: Path) -> PeftModel:
    """A model with the adapter "default" on a named basis of random directions, which cost what any cost."""
    model = get_peft_model(base, adapter_config(UNCALIBRATED)).eval()
    save_basis(model, folder)
    return model


def with_lora(base: nn.Module) -> PeftModel:
    return get_peft_model(base, lora_config(), autocast_adapter_dtype=False).eval()


def lora_config() -> LoraConfig:
    config = adapter_config("lora")
    config.init_lora_weights = False
    return config


def keep(base: nn.Module, counts: list[int], num_loaded: int, place: Path) -> dict[str, Any]:
    """Disk, memory and time to enter."""
    model = get_peft_model(base, adapter_config(UNCALIBRATED)).eval()
    draw_cores(model, "default", 0)
    model.save_pretrained(str(place / "whole"))
    save_basis(model, place / "basis")
    files = [place / f"tenant-{i}" for i in range(NUM_FILES)]
    for seed, file in enumerate(files):
        draw_cores(model, "default", seed)
        model.save_pretrained(str(file))
    found: dict[str, Any] = {
        "disk_bytes": {
            "core": folder_bytes(files[0]),
            "core with its basis": folder_bytes(place / "whole"),
        },
        "bank": [],
        "adapters": {},
    }
    for count in counts:
        before = resident()
        bank = CoreBank(model, count)
        times = [cpu_s(partial(bank.put, f"tenant {i}", files[i % NUM_FILES])) for i in range(count)]
        found["bank"].append(
            {
                "tenants": count,
                "resident_bytes": resident() - before,
                "enter_s": median(times),
            }
        )
        del bank
    found["adapters"]["core"] = loaded(model, [files[i] for i in range(num_loaded)])
    found["adapters"]["core with its basis"] = loaded(model, [place / "whole"] * num_loaded)
    plain = model.unload()
    lora = with_lora(plain)
    lora.save_pretrained(str(place / "lora"))
    found["disk_bytes"]["LoRA r=16"] = folder_bytes(place / "lora")
    found["adapters"]["LoRA r=16"] = loaded(lora, [place / "lora"] * num_loaded)
    return found


def loaded(model: PeftModel, folders: list[Path]) -> dict[str, float]:
    """PEFT's ``load_adapter``, one folder after the other; all are taken away again."""
    before = resident()
    times = [
        cpu_s(partial(model.load_adapter, str(folder), f"loaded-{i}", autocast_adapter_dtype=False))
        for i, folder in enumerate(folders)
    ]
    taken = resident() - before
    for i in range(len(folders)):
        model.delete_adapter(f"loaded-{i}")
    return {"adapters": len(folders), "resident_bytes_each": taken / len(folders), "load_s": median(times)}


def batch(name: str, base: nn.Module, num_tenants: int, rounds: int, place: Path) -> dict[str, Any]:
    """A batch of a row for each tenant, forward and generated."""
    ids = random_ids(num_tenants, PROMPT_TOKENS, base.config.vocab_size)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tenants = [f"t{i:02d}" for i in range(num_tenants)]
    ours, lora, merged = on_a_basis(deepcopy(base), place / name), with_lora(deepcopy(base)), with_lora(deepcopy(base))
    merged = merged.merge_and_unload()
    bank, basis = CoreBank(ours, num_tenants), load_basis(place / name)
    for seed, tenant in enumerate(tenants):
        ours.add_adapter(tenant, deepcopy(ours.peft_config["default"]))
        set_basis(ours, basis, adapter_name=tenant)
        draw_cores(ours, tenant, seed)
        bank.put(tenant, get_core(ours, tenant))
        lora.add_adapter(tenant, lora_config())

    contestants: dict[str, tuple[Any, dict[str, Any], Callable[[], AbstractContextManager[None]]]] = {
        "base": (base, {}, nullcontext),
        "our bank": (ours, {}, lambda: bank.rows(tenants)),
        "our adapter_names": (ours, {"adapter_names": tenants}, nullcontext),
        "LoRA adapter_names": (lora, {"adapter_names": tenants}, nullcontext),
        "LoRA merged, one tenant": (merged, {}, nullcontext),
    }
    new_tokens = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True}

    def run(contestant: str, what: str) -> None:
        model, options, around = contestants[contestant]
        with torch.no_grad(), around():
            if what == "forward":
                model(**rows, **options)
            else:
                model.generate(**rows, **options, **new_tokens)

    found: dict[str, Any] = {"model": name, "tenants": num_tenants, "load": load_average()}
    for what in ("forward", "generate"):
        times = take_turns({name: partial(run, name, what) for name in contestants}, rounds)
        found[what] = {
            name: {"processor_s": seconds, "over_base": ratios(times[name], times["base"])}
            for name, seconds in medians(times).items()
        }
    return found


def keep_table(found: Mapping[str, Any]) -> str:
    """The bytes of a tenant on disk and in memory, and its time to enter."""
    kept = found["keep"]
    rows = [
        [name, f"{kept['disk_bytes'][name]:,}", f"{one['resident_bytes_each'] / 1e6:.2f} MB",
         f"{1e3 * one['load_s']:.0f} ms"]
        for name, one in kept["adapters"].items()
    ]  # fmt: skip
    bank = [
        [f"{row['tenants']:,}", f"{row['resident_bytes'] / 1e6:.1f} MB", f"{1e3 * row['enter_s']:.2f} ms"]
        for row in kept["bank"]
    ]
    heads = ["a tenant is", "bytes on disk", "memory, loaded by PEFT", "time to load"]
    return f"{table(heads, rows)}\n{table(['tenants in a bank', 'memory of the cores', 'time to add one'], bank)}"


def batch_table(*files: Mapping[str, Any]) -> str:
    """A row for each tenant, forward and generated, over the base model."""
    models = [model for found in files for model in found["batch"]]
    _, *contestants = models[0]["forward"]
    rows = [
        [model["model"], words, *(with_range(model[what][name]["over_base"]) for name in contestants)]
        for model in models
        for what, words in (("forward", "forward"), ("generate", "32 tokens"))
    ]
    return table(["model", "what", *contestants], rows)


def main() -> None:
    parser = parser_of(__doc__, "tenants")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct (make smollm2), the batch alone.")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with TemporaryDirectory() as place:
        folder = Path(place)
        if options.smollm2:
            options.name = "tenants-smollm2"
            base = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32).eval()
            base.generation_config.eos_token_id = None
            found = {"batch": [batch("SmolLM2", base, 4 if options.quick else 64, options.rounds, folder)]}
            print(batch_table(found))
            write_found(options, **found)
            return
        if options.quick:
            small = random_qwen2(2, 64, heads=4, vocabulary=64).eval()
            kept = keep(small, [1, 10], 2, folder)
            batches = [batch("2 x 64", random_qwen2(2, 64, heads=4, vocabulary=64).eval(), 4, 1, folder)]
        else:
            wide = random_qwen2(36, 2048, heads=16, inner=64, vocabulary=64).eval()
            kept = keep(wide.to(torch.bfloat16), [1, 100, 1000, 10000], 10, folder)
            del wide
            model = random_qwen2(8, 512, vocabulary=8192).eval()
            pocket = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
            batches = [
                batch("8 x 512", model, 64, options.rounds, folder),
                batch("pocket", pocket, 64, options.rounds, folder),
            ]
    result = {"keep": kept, "batch": batches}
    print(keep_table(result), batch_table(result), sep="\n")
    write_found(options, **result)


if __name__ == "__main__":
    main()
