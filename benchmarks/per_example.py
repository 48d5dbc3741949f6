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

from dataclasses import asdict
from typing import Any

from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import private_tables
from contestants import UNCALIBRATED, labelled_batch, random_ids, with_adapter
from frozencore import per_example_gradients
from harness import medians, memory_of, ratios, take_turns, write_found
from step import Plan, Setting

RANKS = {"frozencore": 16, "lora-r16": 16, "lora-r1": 1}


SETTINGS = [
    Setting(targets, rows, tokens)
    for targets in ("attention", "all-linear")
    for rows, tokens in ((4, 128), (8, 64), (32, 32))
]


def mean_of_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over rows of equally long completions, with logits for these alone."""
    targets = batch["labels"][:, 1:]
    kept = (targets != -100).any(0).nonzero().squeeze(1)
    logits = model(input_ids=batch["input_ids"], logits_to_keep=kept, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets[:, kept].flatten())


class Racer:
    """An adapter, a plain step, and one with the gradient of each row: ours, or Opacus's hooks on every layer."""

    def __init__(self, base: nn.Module, name: str, setting: Setting, batch: dict[str, Tensor]) -> None:
        contestant = UNCALIBRATED if name == "frozencore" else "lora"
        self.model, self.hooked = (with_adapter(base, contestant, setting.modules, RANKS[name]) for _ in range(2))
        self.batch, self.is_ours = batch, name == "frozencore"
        if not self.is_ours:
            self.hooked = GradSampleModule(self.hooked, strict=False)

    def plain(self) -> None:
        mean_of_rows(self.model, self.batch).backward()
        self.model.zero_grad()

    def each(self) -> int:
        """Bytes of all gradients of all rows."""
        if self.is_ours:
            return per_example_gradients(self.model, self.batch).nbytes
        mean_of_rows(self.hooked, self.batch).backward()
        found = [p.grad_sample for p in self.hooked.parameters() if p.requires_grad]
        assert all(len(each) == len(self.batch["labels"]) for each in found)
        num_bytes = sum(each.nbytes for each in found)
        self.hooked.zero_grad()
        for parameter in self.hooked.parameters():
            parameter.grad_sample = None
        return num_bytes


def race(base: nn.Module, setting: Setting, num_rounds: int) -> list[dict[str, Any]]:
    """Steps of all contestants in turns; ``over_plain`` holds quartiles over the plain step of the same round."""
    batch = labelled_batch(random_ids(setting.num_rows, setting.num_tokens, base.config.vocab_size))
    batch.pop("attention_mask")
    racers = {name: Racer(base, name, setting, batch) for name in RANKS}
    steps = {f"{name} {kind}": getattr(one, kind) for name, one in racers.items() for kind in ("plain", "each")}
    times = take_turns(steps, num_rounds)
    step_s = medians(times)
    return [
        {
            "contestant": name,
            "plain_s": step_s[f"{name} plain"],
            "each_s": step_s[f"{name} each"],
            "over_plain": ratios(times[f"{name} each"], times[f"{name} plain"]),
            "num_trainable": sum(p.numel() for p in one.model.parameters() if p.requires_grad),
            "gradient_bytes": one.each(),
            "plain_bytes": memory_of(one.model, one.plain),
            "each_bytes": memory_of(one.model, one.each),
        }
        for name, one in racers.items()
    ]


def main() -> None:
    plan = Plan.read(__doc__, "per_example", SETTINGS)
    rows = [asdict(setting) | one for setting in plan.settings for one in race(plan.base, setting, plan.rounds)]
    print(private_tables.per_example({"rows": rows}))
    write_found(plan.options, ranks=RANKS, rounds=plan.rounds, rows=rows)


if __name__ == "__main__":
    main()
