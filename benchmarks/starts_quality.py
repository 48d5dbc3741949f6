"""Does it help newcomers to start from what others learned? Eight of the 24 tenants, on the basis of the other 16.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/starts_quality.py --data-root DIR --work FOLDER   # an hour and a half; resumes
    python benchmarks/starts_quality.py --quick --out FILE     # made-up tenants on the pocket model: does it run?

All train on the pooled basis of tenants_quality.py (FCCA of rank 16, seed 42), with all their rows and with a quarter,
from zero; from the mean of the cores of the 16 calibrated tenants; from their mean weighted by the softmax of minus
each core's loss on that quarter; from the core of the lowest such loss. LoRAs of rank 16 start as usual, or from the
mean of the products of the 16, cut to rank 16. The mean loss on the newcomers' validation rows chooses among the rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from frozencore import swap_core
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.rows import TokenRow
from frozencore.tune.scoring.forward import unload_adapter
from harness import Record
from tenant_study import (
    LORA_RATE,
    POOLED_RATE,
    TODAY,
    Cores,
    Groups,
    Study,
    Updates,
    arms_of,
    groups_table,
    open_study,
    pairs_of,
    zero_cores,
)  # fmt: skip

STARTS = ("zero", "mean", "weighted", "nearest")


class StartStudy(Study):
    """The study of starts."""

    def run(self) -> None:
        """Measure everything that is missing, what decides most first."""
        for rate in (POOLED_RATE, POOLED_RATE / 2):
            for parts in (1, 4):
                self.started(STARTS, parts, rate)
        for rate in (LORA_RATE, LORA_RATE / 2):
            for start in STARTS[:2]:
                self.loras(start, rate)

    def part_of(self, name: str, parts: int) -> list[TokenRow]:
        """The first rows of a tenant; the answers take turns in them."""
        rows = self.train_rows[name]
        return rows[: len(rows) // parts]

    @cached_property
    def learned(self) -> dict[str, dict[str, Tensor]]:
        """The cores of the calibrated tenants on the pooled basis."""
        missing = [name for name in self.calibrated if not (self.work / f"cores/{name}.safetensors").exists()]
        if missing:
            model = self.on(self.basis("fcca", self.rank), self.rank)
            done = self.train_cores(model, [(name, POOLED_RATE) for name in missing])
            unload_adapter(model)
            for name, _ in done:
                self.stored(f"cores/{name}", partial(dict, done[name, POOLED_RATE].cores))
        return {name: self.stored(f"cores/{name}", dict) for name in self.calibrated}

    def likeness(self, model: PeftModel) -> dict[str, Tensor]:
        """Minus the loss of each learned core on a quarter of each newcomer's rows, in the order of the cores."""

        def measured() -> dict[str, Tensor]:
            rows, pad = [self.part_of(name, 4) for name in self.newcomers], self.encoder.pad_id
            losses = []
            for cores in self.learned.values():
                swap_core(model, cores)
                losses.append(held_out_losses(model, rows, pad_id=pad))
            return dict(zip(self.newcomers, -torch.tensor(losses).mT, strict=True))

        return self.stored("likeness", measured)

    def start(self, arm: str, name: str, model: PeftModel) -> Cores:
        """The core from which a newcomer starts."""
        if arm == "zero":
            return zero_cores(model)
        every = list(self.learned.values())
        alike = self.likeness(model)[name]
        if arm == "nearest":
            return every[int(alike.argmax())]
        weights = alike.softmax(0) if arm == "weighted" else torch.full_like(alike, 1 / len(alike))
        return {layer: sum(w * one[layer] for w, one in zip(weights, every, strict=True)) for layer in every[0]}

    def started(self, arms: Sequence[str], parts: int, rate: float) -> None:
        """Newcomers that train from these starts."""
        for arm in arms:
            named = f"start {arm}" + (", a quarter" if parts > 1 else "")
            missing = [name for name in self.newcomers if not self.has(named, self.rank, name, rate)]
            if not missing:
                continue
            basis, _ = self.basis("fcca", self.rank), self.learned  # before the model has an adapter
            model = self.on(basis, self.rank)
            for name in missing:
                swap_core(model, self.start(arm, name, model))
                ((_, done),) = self.train_cores(model, [(name, rate)], rows={name: self.part_of(name, parts)}).items()
                swap_core(model, done.cores)
                self.add_both(model, named, name, rate)
            unload_adapter(model)

    def add_both(self, model: PeftModel, arm: str, name: str, rate: float) -> None:
        validation = self.score(model, name, "validation")["loss"]
        self.add_score(model, arm, self.rank, name, rate, validation_loss=validation)

    def loras(self, start: str, rate: float) -> None:
        """Newcomers' LoRAs, which start as usual or from the mean product of the calibrated tenants' LoRAs."""
        named = f"lora, start {start}"
        for name in self.newcomers:
            if self.has(named, self.rank, name, rate):
                continue
            factors = self.mean_product if start == "mean" else {}  # before the model has an adapter
            model = self.adapter("lora", self.rank, self.start_of(name))
            put_factors(model, factors)
            self.train_alone(model, name, rate)
            self.add_both(model, named, name, rate)
            unload_adapter(model)

    @cached_property
    def mean_product(self) -> Updates:
        """The mean of the updates of the calibrated tenants' LoRAs, cut to the rank of one."""
        every = [pairs_of(self.own_lora(name, self.rank)) for name in self.calibrated]
        return {layer: mean_of([own[layer] for own in every], self.rank) for layer in every[0]}


def mean_of(products: Sequence[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """The best factors B and A of a rank for the mean of B A, from the factors alone."""
    (left, L), (right, R) = (
        torch.linalg.qr(torch.cat(stacked, dim=1))
        for stacked in ([B for B, _ in products], [A.mT for _, A in products])
    )
    U, S, V = torch.linalg.svd(L @ R.mT / len(products))
    root = S[:rank].sqrt()
    return left @ U[:, :rank] * root, (right @ V.mT[:, :rank] * root).mT


def put_factors(model: PeftModel, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Make these the factors of a LoRA of scale 1."""
    for name, (B, A) in factors.items():
        module: Any = model.get_base_model().get_submodule(name)
        with torch.no_grad():
            module.lora_B["default"].weight.copy_(B)
            module.lora_A["default"].weight.copy_(A)


NAMED = {
    "zero": "zero",
    "mean": "the mean of 16 cores",
    "weighted": "their mean weighted by likeness",
    "nearest": "the nearest core",
}
STARTED: Groups = {
    "eight newcomers": [(NAMED[start], f"start {start}", 16) for start in STARTS],
    "with a quarter of their rows": [(NAMED[start], f"start {start}, a quarter", 16) for start in STARTS],
    "LoRA, r = 16": [
        ("as usual", "lora, start zero", 16),
        ("the mean product of 16 LoRAs, cut to r = 16", "lora, start mean", 16),
    ],
}


def starts_table(lines: Sequence[Record]) -> str:
    return groups_table(arms_of(lines), STARTED, "learning rate", rate_of)


def rate_of(lines: Sequence[Record]) -> str:
    return f"{lines[0]['learning_rate']:g}"


if __name__ == "__main__":
    study = open_study(StartStudy, __doc__, TODAY)
    study.run()
