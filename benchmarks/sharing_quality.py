"""Does calibration pay for tenants, do few entries of a large core, and does it help to start from what others learned?

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/sharing_quality.py --data-root DIR --work FOLDER   # goes on where it stopped
    python benchmarks/sharing_quality.py --quick --out FILE     # made-up tenants on the pocket model: does it run?

``--only bases`` and ``--only starts`` are halves that can run side by side, each with an --out of its own.

Bases, each shared by all 24 tenants, seed 42, rank 16:

    pooled      FCCA of the rows of the 16 calibrated tenants
    rawgrad     the plain gradient's singular directions of the same rows
    random      random P and Q
    lora_xs     the weights' singular directions
    entries     pooled of rank 64; of each layer's R a tenant trains the 256 entries with the largest |PᵀGQ| of its own
                calibration rows. A tenant is 256 values and 256 indices (16 bits) a layer

The rate of ``pooled`` is that of tenants_quality.py; the others' are searched as there.

Starts of the eight newcomers on the pooled basis, with all their rows and with a quarter: zero; the mean of the cores
of the 16 calibrated tenants; their mean weighted by the softmax of minus each core's loss on that quarter; the core of
the lowest such loss. LoRAs of rank 16 start as usual, or from the mean of the products of the 16, cut to rank 16. The
mean loss on the newcomers' validation rows chooses among the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from frozencore import calibrate, frozen_core_layers, swap_core
from frozencore.adapter.bases import get_bases
from frozencore.maths.moments import LayerMoments
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.rows import TokenRow
from frozencore.tune.scoring.forward import unload_adapter
from harness import Record
from tenant_study import (
    RANK,
    Cores,
    Groups,
    Job,
    Study,
    bytes_of,
    factors_of,
    groups_table,
    open_study,
    pairs_of,
    zero_cores,
)

POOLED_RATE, LORA_RATE = 2e-2, 2e-3
FIRST_RATES = {"rawgrad": 2e-2, "random": 4e-2, "lora_xs": 2e-2, "entries": 4e-2}
"""Where a search begins: this rate, twice it and half of it."""
WIDER = 4
"""How many times the rank of the basis of entries is that of the others; the values that train are as many."""
INDEX_BYTES = 2
STARTS = ("zero", "mean", "weighted", "nearest")
START_RATES = (POOLED_RATE, POOLED_RATE / 2)


class SharingStudy(Study):
    """The study, by parts that resume."""

    def run(self, only: str | None) -> None:
        """Measure everything that is missing, what decides most first."""
        first, second = START_RATES
        order: list[tuple[str, Callable[[], None]]] = [
            ("starts", self.pooled),
            ("bases", partial(self.shared, "random")),
            ("starts", partial(self.started, ["mean"], 1, first)),
            ("bases", partial(self.shared, "rawgrad")),
            ("starts", partial(self.started, STARTS[2:], 1, first)),
            ("starts", partial(self.started, STARTS, 4, first)),
            ("bases", self.entries),
            ("starts", partial(self.started, STARTS, 1, second)),
            ("bases", partial(self.shared, "lora_xs")),
            ("starts", partial(self.started, STARTS, 4, second)),
            ("starts", partial(self.loras, "mean", LORA_RATE)),
            ("starts", partial(self.loras, "zero", LORA_RATE)),
            ("starts", partial(self.loras, "mean", LORA_RATE / 2)),
            ("starts", partial(self.loras, "zero", LORA_RATE / 2)),
        ]
        for part, measure in order:
            if only in (None, part):
                measure()

    @property
    def rank(self) -> int:
        return 4 if self.quick else RANK

    # ----------------------------------------------------------------------------------------------------- shared bases

    @cached_property
    def of_tenants(self) -> dict[str, dict[str, LayerMoments]]:
        return {name: self.moments(name) for name in self.everyone}

    def basis(self, method: str, rank: int) -> dict[str, Tensor]:
        """A basis of the pooled moments of the calibrated tenants, or of none."""

        def made() -> dict[str, Tensor]:
            moments: dict[str, LayerMoments] = {}
            if method in ("fcca", "rawgrad"):
                for name in self.calibrated:
                    for layer, found in self.of_tenants[name].items():
                        moments[layer] = moments[layer] + found if layer in moments else found
            model = self.adapter(method, rank)
            if moments:
                calibrate(model, moments=moments, progress=False)
            bases = get_bases(model)
            unload_adapter(model)
            return bases

        return self.stored(f"{method}-{rank}", made)

    def pooled(self) -> None:
        """All tenants from zero on the pooled basis; the newcomers are also the arm that starts from zero."""
        missing = [name for name in self.everyone if not self.has("pooled", self.rank, name, POOLED_RATE)]
        if not missing:
            return
        model = self.on(self.basis("fcca", self.rank), self.rank)
        sizes = bytes_of(model, shared=True)
        done = self.train_cores(model, [(name, POOLED_RATE) for name in missing])
        for name, rate in done:
            swap_core(model, done[name, rate].cores)
            self.stored(f"cores/{name}", partial(dict, done[name, rate].cores))
            found = self.score(model, name, "held-out")
            self.add("pooled", self.rank, name, rate, **found, **sizes)
            if name in self.newcomers:
                validation = self.score(model, name, "validation")["loss"]
                self.add("start zero", self.rank, name, rate, **found, validation_loss=validation)
        unload_adapter(model)

    def shared(self, arm: str) -> None:
        """All tenants on another basis, at the best rate of a search."""

        def measured(phase: str, jobs: Sequence[Job], **more: Any) -> None:
            model = self.on(self.basis(arm, self.rank), self.rank)
            sizes = bytes_of(model, shared=True) if phase == "final" else {}
            done = self.train_cores(model, jobs)
            for (name, rate), trained in done.items():
                swap_core(model, trained.cores)
                found = self.score(model, name, "held-out" if phase == "final" else "validation")
                self.add(arm, self.rank, name, rate, phase=phase, **found, **sizes)
            unload_adapter(model)

        self._searched_then_all(arm, self.rank, measured)

    def _searched_then_all(self, arm: str, rank: int, measured: Callable[[str, Sequence[Job]], None]) -> None:
        rate = self.searched_rate(FIRST_RATES[arm], partial(measured, "search"), arm, rank)
        if missing := [(name, rate) for name in self.everyone if not self.has(arm, rank, name, rate)]:
            measured("final", missing)

    def entries(self) -> None:
        """All tenants, each with a choice of the entries of a larger core; the others stay zero."""
        rank, num = WIDER * self.rank, self.rank**2

        def chosen() -> dict[str, Tensor]:
            basis, masks = self.basis("fcca", rank), {}
            for name, moments in self.of_tenants.items():
                for layer, found in moments.items():
                    size = (basis[f"{layer}.P"].mT @ found.G @ basis[f"{layer}.Q"]).abs().flatten()
                    masks[f"{name} {layer}"] = torch.zeros_like(size, dtype=torch.bool)
                    masks[f"{name} {layer}"][size.topk(num).indices] = True
            return {key: mask.view(rank, rank) for key, mask in masks.items()}

        def measured(phase: str, jobs: Sequence[Job]) -> None:
            masks, model = self.stored(f"entries-{rank}", chosen), self.on(self.basis("fcca", rank), rank)
            layers = frozen_core_layers(model, "default")
            sizes = bytes_of(model, shared=True)
            values = num * len(layers)
            memory = values * (torch.float32.itemsize + INDEX_BYTES)
            sizes |= {"disk_bytes": sizes["disk_bytes"] - sizes["memory_bytes"] + memory, "memory_bytes": memory}
            for name, rate in jobs:
                swap_core(model, zero_cores(model))
                kept = [
                    layer.core("default").register_hook(partial(torch.mul, masks[f"{name} {place}"]))
                    for place, layer in layers.items()
                ]
                self.train_alone(model, name, rate)
                for hook in kept:
                    hook.remove()
                found = self.score(model, name, "held-out" if phase == "final" else "validation")
                about = sizes | {"values": values} if phase == "final" else {}
                self.add("entries", rank, name, rate, phase=phase, **found, **about)
            unload_adapter(model)

        self._searched_then_all("entries", rank, measured)

    # ----------------------------------------------------------------------------------------------------------- starts

    def part_of(self, name: str, parts: int) -> list[TokenRow]:
        """The first rows of a tenant; the answers take turns in them."""
        rows = self.train_rows[name]
        return rows[: len(rows) // parts]

    @cached_property
    def learned(self) -> dict[str, dict[str, Tensor]]:
        """The cores of the calibrated tenants on the pooled basis."""
        self.pooled()
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
            model = self.on(self.basis("fcca", self.rank), self.rank)
            for name in missing:
                swap_core(model, self.start(arm, name, model))
                ((_, done),) = self.train_cores(model, [(name, rate)], rows={name: self.part_of(name, parts)}).items()
                swap_core(model, done.cores)
                self.add(named, self.rank, name, rate, **self.both_scores(model, name))
            unload_adapter(model)

    def both_scores(self, model: PeftModel, name: str) -> Record:
        validation = self.score(model, name, "validation")["loss"]
        return {**self.score(model, name, "held-out"), "validation_loss": validation}

    def loras(self, start: str, rate: float) -> None:
        """Newcomers' LoRAs, which start as usual or from the mean product of the calibrated tenants' LoRAs."""
        named = f"lora, start {start}"
        for name in self.newcomers:
            if self.has(named, self.rank, name, rate):
                continue
            factors = self.mean_product if start == "mean" else {}  # before the model has an adapter
            model = self.own_lora(name)
            put_factors(model, factors)
            self.train_alone(model, name, rate)
            self.add(named, self.rank, name, rate, **self.both_scores(model, name))
            unload_adapter(model)

    def own_lora(self, name: str) -> PeftModel:
        """A LoRA with a random start of the tenant's own."""
        return self.adapter("lora", self.rank, 1000 + self.everyone.index(name))

    @cached_property
    def mean_product(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The mean of the updates of the calibrated tenants' LoRAs, cut to the rank of one; trains LoRAs as needed."""

        def trained(name: str) -> dict[str, Tensor]:
            model = self.own_lora(name)
            self.train_alone(model, name, LORA_RATE)
            factors = factors_of(model)
            unload_adapter(model)
            return factors

        every = [pairs_of(self.stored(f"lora-{self.rank}/{name}", partial(trained, name))) for name in self.calibrated]
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


BASES: Groups = {
    "one basis for 24 tenants": [
        ("FCCA of the rows of 16 of them, r = 16", "pooled", 16),
        ("RawGrad of these rows, r = 16", "rawgrad", 16),
        ("LoRA-XS, r = 16", "lora_xs", 16),
        ("Random, r = 16", "random", 16),
        ("FCCA, r = 64, of which each trains 256 entries a layer", "entries", 64),
    ],
}
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


def bases_table(lines: Sequence[Record]) -> str:
    return groups_table(lines, BASES, "learning rate", rate_of)


def starts_table(lines: Sequence[Record]) -> str:
    return groups_table(lines, STARTED, "learning rate", rate_of)


def rate_of(lines: Sequence[Record]) -> str:
    return f"{lines[0]['learning_rate']:g}"


if __name__ == "__main__":
    study, options = open_study(
        SharingStudy, __doc__, "sharing-quality", only={"choices": ["bases", "starts"], "help": "One half alone."}
    )
    study.run(options.only)
