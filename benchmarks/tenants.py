"""What a tenant costs: bytes on disk, memory and time to enter, and a batch of 64 rows of 64 tenants.

    OMP_NUM_THREADS=1 python benchmarks/tenants.py             # about ten minutes;  --quick: tiny sizes

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

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from frozencore import CoreBank, FrozenCoreConfig, frozen_core_layers, load_basis, save_basis, set_bases, unpack_adapter
from frozencore.files.whole_file import write_json
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.run.provenance import provenance
from machine import load_average, machine_name

RANK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NUM_FILES = 100
NEW_TOKENS, PROMPT_TOKENS = 32, 32


def qwen2(num_layers: int, width: int, heads: int, key_heads: int, *, feed_forward: int, vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=num_layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


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
    model = get_peft_model(base, FrozenCoreConfig(r=RANK, constructor="random", target_modules=ATTENTION)).eval()
    save_basis(model, folder)
    return model


def with_lora(base: nn.Module) -> PeftModel:
    return get_peft_model(base, lora_config(), autocast_adapter_dtype=False).eval()


def lora_config() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ATTENTION, init_lora_weights=False)


def keep(base: nn.Module, counts: list[int], num_loaded: int, place: Path) -> dict[str, Any]:
    """Disk, memory and time to enter."""
    model = on_a_basis(base, place / "basis")
    num_values = sum(layer.factors("default")[2].numel() for layer in frozen_core_layers(model, "default").values())
    files = [place / f"tenant-{i}" for i in range(NUM_FILES)]
    for seed, file in enumerate(files):
        draw_cores(model, "default", seed)
        model.save_pretrained(str(file))
    unpack_adapter(files[0], place / "whole")
    found: dict[str, Any] = {
        "trained_values": num_values,
        "disk_bytes": {
            "core": folder_bytes(files[0]),
            "core, weights alone": (files[0] / "adapter_model.safetensors").stat().st_size,
            "core with its basis": folder_bytes(place / "whole"),
            "basis": folder_bytes(place / "basis"),
        },
        "bank": [],
        "adapters": {},
    }
    for count in counts:
        before = resident()
        bank = CoreBank(model, count)
        times = []
        for i in range(count):
            started = time.process_time()
            bank.put(f"tenant {i}", files[i % NUM_FILES])
            times.append(time.process_time() - started)
        found["bank"].append(
            {
                "tenants": count,
                "resident_bytes": resident() - before,
                "enter_s": median(times),
                "enter_s_p95": quantiles(times, n=20)[-1] if count > 1 else times[0],
                "all_s": sum(times),
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
    before, times = resident(), []
    for i, folder in enumerate(folders):
        started = time.process_time()
        model.load_adapter(str(folder), f"loaded-{i}", autocast_adapter_dtype=False)
        times.append(time.process_time() - started)
    taken = resident() - before
    for i in range(len(folders)):
        model.delete_adapter(f"loaded-{i}")
    return {"adapters": len(folders), "resident_bytes_each": taken / len(folders), "load_s": median(times)}


def batch(name: str, base: nn.Module, num_tenants: int, rounds: int, place: Path) -> dict[str, Any]:
    """A batch of a row for each tenant, forward and generated."""
    vocabulary = base.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (num_tenants, PROMPT_TOKENS), generator=generator)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tenants = [f"t{i:02d}" for i in range(num_tenants)]
    ours, lora, merged = on_a_basis(deepcopy(base), place / name), with_lora(deepcopy(base)), with_lora(deepcopy(base))
    merged = merged.merge_and_unload()
    bank, basis = CoreBank(ours, num_tenants), load_basis(place / name)
    for seed, tenant in enumerate(tenants):
        ours.add_adapter(tenant, deepcopy(ours.peft_config["default"]))
        set_bases(ours, basis, adapter_name=tenant)
        draw_cores(ours, tenant, seed)
        bank.put(tenant, {n: layer.factors(tenant)[2] for n, layer in frozen_core_layers(ours, tenant).items()})
        lora.add_adapter(tenant, lora_config())

    @contextmanager
    def through_the_bank() -> Iterator[None]:
        with bank.rows(tenants):
            yield

    contestants: dict[str, tuple[Any, dict[str, Any], Callable[[], Any]]] = {
        "base": (base, {}, nullcontext),
        "our bank": (ours, {}, through_the_bank),
        "our adapter_names": (ours, {"adapter_names": tenants}, nullcontext),
        "LoRA adapter_names": (lora, {"adapter_names": tenants}, nullcontext),
        "LoRA merged, one tenant": (merged, {}, nullcontext),
    }
    found: dict[str, Any] = {"model": name, "tenants": num_tenants, "load": load_average()}
    for what in ("forward", "generate"):
        times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for turn in range(rounds + 1):
            for contestant, (model, options, around) in contestants.items():
                with torch.no_grad(), around():
                    started = time.process_time()
                    if what == "forward":
                        model(**rows, **options)
                    else:
                        model.generate(
                            **rows, **options, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
                        )
                    spent = time.process_time() - started
                if turn:  # the first warms up
                    times[contestant].append(spent)
        found[what] = {
            contestant: {
                "processor_s": median(own),
                "over_base": quartiles([a / b for a, b in zip(own, times["base"], strict=True)]),
            }
            for contestant, own in times.items()
        }
    return found


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return middle, low, high


def print_tables(result: dict[str, Any], console: Console) -> None:
    kept = result["keep"]
    disk = Table("a tenant on disk", "bytes", title=f"{kept['trained_values']:,} trained values")
    for name, size in kept["disk_bytes"].items():
        disk.add_row(name, f"{size:,}")
    console.print(disk)
    bank = Table("tenants in a bank", "memory", "to enter", "95 %", "all")
    for row in kept["bank"]:
        bank.add_row(
            f"{row['tenants']:,}", f"{row['resident_bytes'] / 1e6:.1f} MB", f"{1e3 * row['enter_s']:.2f} ms",
            f"{1e3 * row['enter_s_p95']:.2f} ms", f"{row['all_s']:.1f} s",
        )  # fmt: skip
    console.print(bank)
    adapters = Table("loaded with PEFT", "adapters", "memory each", "to load")
    for name, row in kept["adapters"].items():
        size = f"{row['resident_bytes_each'] / 1e6:.2f} MB"
        adapters.add_row(name, str(row["adapters"]), size, f"{1e3 * row['load_s']:.0f} ms")
    console.print(adapters)
    for found in result["batch"]:
        table = Table("64 rows, 64 tenants", "forward / base", "32 tokens / base", title=found["model"])
        for name in found["forward"]:
            cells = [found[what][name]["over_base"] for what in ("forward", "generate")]
            table.add_row(name, *(f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in cells))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / f"tenants-{machine_name()}.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with TemporaryDirectory() as place:
        folder = Path(place)
        if options.quick:
            kept = keep(qwen2(2, 64, 4, 2, feed_forward=32, vocabulary=64), [1, 10], 2, folder)
            small = qwen2(2, 64, 4, 2, feed_forward=128, vocabulary=64)
            batches = [batch("2 x 64", small, 4, 1, folder)]
        else:
            wide = qwen2(36, 2048, 16, 2, feed_forward=64, vocabulary=64).to(torch.bfloat16)
            kept = keep(wide, [1, 100, 1000, 10000], 10, folder)
            del wide
            model = qwen2(8, 512, 8, 2, feed_forward=1408, vocabulary=8192)
            pocket = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
            batches = [
                batch("8 x 512", model, 64, options.rounds, folder),
                batch("pocket", pocket, 64, options.rounds, folder),
            ]
    result = {
        "benchmark": "tenants",
        "quick": options.quick,
        "keep": kept,
        "batch": batches,
        "provenance": provenance(),
    }
    print_tables(result, Console(width=100))
    write_json(options.out, result)


if __name__ == "__main__":
    main()
