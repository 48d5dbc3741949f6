"""A bank of cores in few bits beside one in float32: bytes of 10,000 tenants, a put, and a batch of 64 tenants.

    OMP_NUM_THREADS=1 python benchmarks/bank_bits.py    # minutes;  --quick: tiny sizes

The attention shapes of SmolLM2-135M (30 layers, 576 wide, keys and values 192 wide) and Qwen2.5-3B (36 layers, 2048
wide, 256-wide keys and values), rank 16; feed-forward and vocabulary, which hold no adapter, are small. Banks are
allocated whole and filled. ``put`` reads a folder whose core has the bits of the bank. ``step``: a bank's rows are
entered and the model is run on them, 64 rows of one token, the case in which entering costs most. Banks take turns in
an order that alternates; each time is divided by that of float32 of the same round. Times are processor seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import get_peft_model
from torch import nn

from contestants import UNCALIBRATED, adapter_config, random_qwen2
from frozencore import CoreBank, save_basis
from frozencore.adapter.folders import read_adapter
from harness import cpu_s, parser_of, ratios, table, take_turns, with_range, write_found
from tenants import draw_cores

BITS = (32, 8, 4)
SHAPES: Mapping[str, tuple[int, int, int, int]] = {
    "SmolLM2-135M": (30, 576, 9, 3), "Qwen2.5-3B": (36, 2048, 16, 2),
}  # fmt: skip
"""Layers, width, heads, and heads of keys and values."""
NUM_ROWS = 64


def bank_of(model: nn.Module, folders: Mapping[int, Path], bits: int, capacity: int) -> dict[str, Any]:
    """The bytes of a full bank, and the time of a put."""
    bank = CoreBank(model, capacity, bits=bits)
    slots = (
        [*bank.blocks.values()] if bank.packed is None else [*bank.packed.codes.values(), *bank.packed.scales.values()]
    )
    for X in slots:
        X[:] = 1  # the system gives memory only to what is written
    times = [cpu_s(partial(bank.put, f"tenant {i}", folders[bits])) for i in range(20)]
    return {"bytes": sum(X.nbytes for X in slots), "put_s": median(times)}


def step(model: nn.Module, bank: CoreBank, names: list[str], ids: torch.Tensor) -> None:
    with torch.inference_mode(), bank.rows(names):
        model(input_ids=ids)


def run(model: nn.Module, capacity: int, rounds: int, place: Path) -> dict[str, Any]:
    """All numbers of one model."""
    adapted = get_peft_model(model, adapter_config(UNCALIBRATED)).eval()
    draw_cores(adapted, "default", 0)
    save_basis(adapted, place / "basis")
    adapted.save_pretrained(str(place / "whole"))
    saved, folders = read_adapter(place / "whole"), {bits: place / str(bits) for bits in BITS}
    for bits, folder in folders.items():
        saved.write(folder, saved.core.in_bits(bits, saved.ranks))
    found: dict[str, Any] = {str(bits): bank_of(adapted, folders, bits, capacity) for bits in BITS}
    names, ids = [f"tenant {i}" for i in range(NUM_ROWS)], torch.randint(1, 100, (NUM_ROWS, 1))
    banks = {bits: CoreBank(adapted, NUM_ROWS, bits=bits) for bits in BITS}
    for bits, bank in banks.items():
        for name in names:
            bank.put(name, folders[bits])
    runs = {str(bits): partial(step, adapted, bank, names, ids) for bits, bank in banks.items()}
    runs["32, again"] = runs["32"]
    times = take_turns(runs, rounds)
    for name in [name for name in times if name != "32"]:
        found.setdefault(name, {})["step_over_float32"] = ratios(times[name], times["32"])
    found["32"]["step_s"] = median(times["32"])
    return found


def table_of(result: Mapping[str, Any]) -> str:
    """A row for each model and number of bits."""
    rows = [
        [
            model, bits, f"{found[bits]['bytes'] / 1e6:,.1f} MB", f"{1e3 * found[bits]['put_s']:.1f} ms",
            with_range(found["32, again" if bits == "32" else bits]["step_over_float32"], ".3f"),
        ]
        for model, found in result["models"].items()
        for bits in map(str, BITS)
    ]  # fmt: skip
    heads = [
        "shapes of",
        "bits",
        f"cores of {result['tenants']:,} tenants",
        "a put",
        "a batch of 64 tenants, over float32",
    ]
    return table(heads, rows)


def main() -> None:
    options = parser_of(__doc__, "bank_bits").parse_args()
    capacity, rounds = (20, 2) if options.quick else (10_000, 25)
    models: dict[str, Any] = {}
    for name, (num_layers, width, heads, kv_heads) in SHAPES.items():
        kinds = {"heads": heads, "kv_heads": kv_heads, "inner": 64, "vocabulary": 128, "tied": True}
        model = random_qwen2(2 if options.quick else num_layers, width, **kinds)  # type: ignore[arg-type]
        with TemporaryDirectory() as place:
            models[name] = run(model, capacity, rounds, Path(place))
    result = {"tenants": capacity, "models": models}
    print(table_of(result))
    write_found(options, **result)


if __name__ == "__main__":
    main()
