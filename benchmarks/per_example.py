"""Gradients of each row side by side: a plain step with a core, the same with the gradient of each row, and PEFT's LoRA
of rank 16 and 1, plain and under the hooks of Opacus. One process, one set of base weights, one batch; the contestants
take turns.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/per_example.py
    python benchmarks/per_example.py --quick

A plain step is forward, the mean of the rows' losses over their completions, and backward. A step with gradients of
each row ends with rows x values float32 numbers. No step has an optimiser. Each step is divided by its own plain step
of the same round; medians and quartiles of these ratios stand in the table. Memory is what the process, or the GPU,
held at most above what it held before the step, in a round of its own that is not timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from opacus import GradSampleModule
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from frozencore import per_example_gradients
from frozencore.files.whole_file import write_json
from frozencore.tune.run.peak_memory import PeakMemory
from frozencore.tune.run.provenance import provenance
from step import adapt, spread, timed, wide_model

RANKS = {"frozencore": 16, "lora-r16": 16, "lora-r1": 1}


@dataclass(frozen=True)
class Setting:
    """What is adapted, and the batch: rows x tokens."""

    targets: str
    num_rows: int
    num_tokens: int


SETTINGS = [
    Setting(targets, rows, tokens)
    for targets in ("attention", "all-linear")
    for rows, tokens in ((4, 128), (8, 64), (32, 32))
]


@dataclass(frozen=True)
class Measured:
    """One contestant in one setting.

    Attributes:
        plain_s, each_s: Median processor seconds of a plain step, and of one with the gradient of each row.
        over_plain: Median, lower and upper quartile of the second over the first of the same round.
        gradient_bytes: All gradients of all rows.
        plain_bytes, each_bytes: Memory at most above what was held before such a step.
    """

    contestant: str
    plain_s: float
    each_s: float
    over_plain: tuple[float, float, float]
    num_trainable: int
    gradient_bytes: int
    plain_bytes: int
    each_bytes: int


def batch_of(setting: Setting, vocabulary: int) -> dict[str, Tensor]:
    """Rows of one length, whose last quarter is the completion."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (setting.num_rows, setting.num_tokens), generator=generator)
    labels = ids.clone()
    labels[:, : 3 * setting.num_tokens // 4] = -100
    return {"input_ids": ids, "labels": labels}


def mean_of_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over rows of equally long completions, with logits for these alone."""
    targets = batch["labels"][:, 1:]
    kept = (targets != -100).any(0).nonzero().squeeze(1)
    logits = model(input_ids=batch["input_ids"], logits_to_keep=kept, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets[:, kept].flatten())


class Cores:
    """A frozen core, and the call of ours."""

    def __init__(self, base: nn.Module, name: str, setting: Setting, batch: dict[str, Tensor]) -> None:
        self.model, self.batch = adapt(base, "frozencore", setting.targets, RANKS[name]), batch
        self.trained = [p for p in self.model.parameters() if p.requires_grad]

    def plain(self) -> None:
        mean_of_rows(self.model, self.batch).backward()
        self.model.zero_grad()

    def each(self) -> int:
        return per_example_gradients(self.model, self.batch).nbytes


class Lora:
    """PEFT's LoRA, plain and in a copy under Opacus, which hooks every layer that trains."""

    def __init__(self, base: nn.Module, name: str, setting: Setting, batch: dict[str, Tensor]) -> None:
        self.model, self.batch = adapt(base, "lora", setting.targets, RANKS[name]), batch
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.hooked: Any = GradSampleModule(adapt(base, "lora", setting.targets, RANKS[name]), strict=False)

    def plain(self) -> None:
        mean_of_rows(self.model, self.batch).backward()
        self.model.zero_grad()

    def each(self) -> int:
        mean_of_rows(self.hooked, self.batch).backward()
        found = [p.grad_sample for p in self.hooked.parameters() if p.requires_grad]
        assert all(len(each) == len(self.batch["labels"]) for each in found)
        num_bytes = sum(each.nbytes for each in found)
        self.hooked.zero_grad()
        for parameter in self.hooked.parameters():
            parameter.grad_sample = None
        return num_bytes


def memory_of(model: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes that a step holds at most, above what was held before."""
    memory = PeakMemory(model)
    held = memory.largest
    with memory.phase("training"):
        step()
    return max(0, memory.largest - held)


def race(base: nn.Module, setting: Setting, num_rounds: int) -> list[Measured]:
    """Alternating steps of all contestants, the order turned round every other time; one round before, untimed."""
    batch = batch_of(setting, base.config.vocab_size)
    contestants: dict[str, Cores | Lora] = {
        name: (Cores if name == "frozencore" else Lora)(deepcopy(base), name, setting, batch) for name in RANKS
    }
    times: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in RANKS for kind in ("plain", "each")}
    for round_ in range(num_rounds + 1):
        for name, kind in list(times)[:: 1 if round_ % 2 else -1]:
            duration = timed(getattr(contestants[name], kind))
            if round_:
                times[name, kind].append(duration)
    return [
        Measured(
            contestant=name,
            plain_s=median(times[name, "plain"]),
            each_s=median(times[name, "each"]),
            over_plain=spread(times[name, "each"], times[name, "plain"]),
            num_trainable=sum(p.numel() for p in one.trained),
            gradient_bytes=one.each(),
            plain_bytes=memory_of(one.model, one.plain),
            each_bytes=memory_of(one.model, one.each),
        )
        for name, one in contestants.items()
    ]


def show(setting: Setting, measured: list[Measured]) -> None:
    table = Table(title=f"{setting.targets}, {setting.num_rows} x {setting.num_tokens}")
    for heading in ("", "plain step", "each row's", "over plain", "trained", "gradients", "plain memory", "memory"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in measured:
        middle, low, high = one.over_plain
        table.add_row(
            one.contestant, f"{one.plain_s * 1e3:.1f} ms", f"{one.each_s * 1e3:.1f} ms",
            f"{middle:.3f} ({low:.3f}-{high:.3f})", f"{one.num_trainable:,}",
            *(f"{size / 2**20:.1f} MiB" for size in (one.gradient_bytes, one.plain_bytes, one.each_bytes)),
        )  # fmt: skip
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="Two narrow layers, short rows: does it run?")
    parser.add_argument("--out", type=Path, help="Default: results/per_example.json beside this; none with --quick.")
    options = parser.parse_args()
    out = options.out or (None if options.quick else Path(__file__).parent / "results" / "per_example.json")

    base = wide_model(num_layers=2, width=64) if options.quick else wide_model(num_layers=8, width=512)
    num_rounds = 3 if options.quick else options.rounds
    rows = []
    for setting in [Setting("attention", 2, 16)] if options.quick else SETTINGS:
        measured = race(base, setting, num_rounds)
        show(setting, measured)
        rows += [asdict(setting) | asdict(one) for one in measured]
    if out is not None:
        run = {"rounds": num_rounds, "threads": torch.get_num_threads(), "cpus": sorted(os.sched_getaffinity(0))}
        write_json(
            out, {"benchmark": "gradients of each row", "ranks": RANKS, **run, "rows": rows, "provenance": provenance()}
        )


if __name__ == "__main__":
    main()
