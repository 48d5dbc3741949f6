"""Does one shared basis cost quality, and which basis? 24 tenants with cores on own or shared bases, or with LoRAs.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/tenants_quality.py --data-root DIR --work FOLDER   # hours; resumes
    python benchmarks/tenants_quality.py --quick --out FILE     # made-up tenants on the pocket model: does it run?

    own         FCCA of each tenant's own rows
    pooled      one FCCA of the rows of the 16 calibrated tenants
    rawgrad     one basis of the plain gradient's singular directions, of the same rows
    random      one basis of random directions
    lora_xs     one basis of the weights' singular directions
    entries     pooled of rank 64; of each layer's R a tenant trains the 256 entries with the largest |PᵀGQ| of its own
                calibration rows. A tenant is 256 values and 256 indices (16 bits) a layer
    lora        a LoRA for each tenant

The learning rate of each arm is searched on validation rows of three tenants, by factors of two until the best one has
others on both sides, at rank 16 (LoRA: at each rank) and seed 42, and holds for all tenants, ranks and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from peft import PeftModel
from torch import Tensor

from frozencore import calibrate, frozen_core_layers, swap_core
from frozencore.adapter.bases import basis_fingerprint
from frozencore.maths.moments import LayerMoments
from frozencore.tune.scoring.forward import unload_adapter
from harness import Record
from tenant_rows import TENANTS, write_tenants
from tenant_study import (
    RANK,
    SEED,
    TODAY,
    Arm,
    Groups,
    Job,
    Lines,
    Study,
    arms_of,
    bytes_of,
    groups_table,
    open_study,
    zero_cores,
)

RATES = {
    "own": 1e-2, "pooled": 1e-2, "rawgrad": 2e-2, "random": 4e-2, "lora_xs": 2e-2, "entries": 4e-2, "lora": 4e-3,
}  # fmt: skip
"""Where a search begins: this rate, twice it and half of it."""
SEEDS = (SEED, 43, 44)
WIDER = 4
"""How many times the rank of the basis of entries is that of the others; the values that train are as many."""
INDEX_BYTES = 2

FULL: Sequence[tuple[Sequence[Arm], Sequence[int]]] = [
    ([("own", RANK), ("pooled", RANK), ("lora", 1), ("lora", RANK)], SEEDS),
    ([(arm, rank) for rank in (8, 32) for arm in ("own", "pooled")], SEEDS),
    ([("rawgrad", RANK), ("random", RANK), ("entries", WIDER * RANK), ("lora_xs", RANK)], (SEED,)),
]
"""Arms and their seeds, what counts most first."""
QUICK = [([("own", 4), ("pooled", 4), ("random", 4), ("entries", WIDER * 4), ("lora", 1)], (SEED,))]


class ArmsStudy(Study):
    """The study of arms; the moments of a seed are held for all arms and ranks."""

    held: tuple[int, dict[str, dict[str, LayerMoments]]] = (0, {})

    def moments(self, name: str, seed: int = SEED) -> dict[str, LayerMoments]:
        if self.held[0] != seed:
            self.held = seed, {}
        if name not in self.held[1]:
            self.held[1][name] = super().moments(name, seed)
        return self.held[1][name]

    def run(self) -> None:
        """Measure everything that is missing."""
        self.base()
        for arms, seeds in QUICK if self.quick else FULL:
            for seed in seeds:
                for arm, rank in arms:
                    searched = rank if self.quick or arm in ("lora", "entries") else RANK
                    search = partial(self.measure, "search", arm, searched, SEED)
                    rate = self.searched_rate(RATES[arm], search, arm, searched)
                    jobs = [(name, rate) for name in self.everyone]
                    self.measure("final", arm, rank, seed, [j for j in jobs if not self.has(arm, rank, *j, seed=seed)])

    def measure(self, phase: str, arm: str, rank: int, seed: int, jobs: Sequence[Job]) -> None:
        """Train and score tenants at their learning rates."""
        part = "held-out" if phase == "final" else "validation"
        for model, (name, rate), about in self.trained(arm, rank, seed, jobs) if jobs else ():
            more = about if phase == "final" else {}
            self.add(arm, rank, name, rate, seed=seed, phase=phase, **self.score(model, name, part), **more)

    def trained(self, arm: str, rank: int, seed: int, jobs: Sequence[Job]) -> Iterator[tuple[PeftModel, Job, Record]]:
        """The model with each tenant's adapter, which is gone at the next, and what the adapter is."""
        if arm == "lora":
            for name, rate in jobs:
                model = self.adapter("lora", rank, seed)
                about = self.train_alone(model, name, rate, seed)
                yield model, (name, rate), {**about, **bytes_of(model, shared=False)}
                unload_adapter(model)
        elif arm == "own":
            for name in dict.fromkeys(name for name, _ in jobs):
                moments = self.moments(name, seed)  # before the model has an adapter
                model = self.adapter("fcca", rank, seed)
                calibrate(model, moments=moments, progress=False)
                yield from self.cores(model, [job for job in jobs if job[0] == name], seed, shared=False)
                unload_adapter(model)
        else:
            constructor = "fcca" if arm in ("pooled", "entries") else arm
            masks = self.masks(rank, seed) if arm == "entries" else {}
            model = self.on(self.basis(constructor, rank, seed), rank)
            if arm == "entries":
                yield from self.entries(model, rank, jobs, seed, masks)
            else:
                yield from self.cores(model, jobs, seed, shared=True)
            unload_adapter(model)

    def cores(
        self, model: PeftModel, jobs: Sequence[Job], seed: int, *, shared: bool
    ) -> Iterator[tuple[PeftModel, Job, Record]]:
        """Tenants that train together on the basis of the model."""
        sizes = {**bytes_of(model, shared=shared), "basis": basis_fingerprint(model)}
        for job, trained in self.train_cores(model, jobs, seed).items():
            swap_core(model, trained.cores)
            report = trained.report
            about = {"training_bytes": report.state_held_bytes, "steps": report.num_steps}
            yield model, job, {**sizes, **about, "train_loss": report.final_loss}

    def masks(self, rank: int, seed: int) -> dict[str, Tensor]:
        """Which entries of each layer's core a tenant trains, under ``<tenant> <layer>``."""

        def made() -> dict[str, Tensor]:
            basis, chosen = self.basis("fcca", rank, seed), {}
            for name in self.everyone:
                for layer, found in self.moments(name, seed).items():
                    size = (basis[f"{layer}.P"].mT @ found.G @ basis[f"{layer}.Q"]).abs().flatten()
                    mask = torch.zeros_like(size, dtype=torch.bool)
                    mask[size.topk((rank // WIDER) ** 2).indices] = True
                    chosen[f"{name} {layer}"] = mask.view(rank, rank)
            return chosen

        return self.stored(f"entries-{rank}-{seed}", made)

    def entries(
        self, model: PeftModel, rank: int, jobs: Sequence[Job], seed: int, masks: dict[str, Tensor]
    ) -> Iterator[tuple[PeftModel, Job, Record]]:
        """Tenants that train some entries of their cores; the others stay zero."""
        layers, sizes = frozen_core_layers(model, "default"), bytes_of(model, shared=True)
        values = (rank // WIDER) ** 2 * len(layers)
        memory = values * (torch.float32.itemsize + INDEX_BYTES)
        sizes["disk_bytes"] += memory - sizes["memory_bytes"]
        for name, rate in jobs:
            swap_core(model, zero_cores(model))
            hooks = [
                layer.core("default").register_hook(partial(torch.mul, masks[f"{name} {place}"]))
                for place, layer in layers.items()
            ]
            about = self.train_alone(model, name, rate, seed)
            for hook in hooks:
                hook.remove()
            yield model, (name, rate), {**sizes, **about, "values": values, "memory_bytes": memory}


LABELS = {"own": "its own basis", "pooled": "one basis of the rows of 16 tenants", "lora": "a LoRA"}
SHARING: Sequence[tuple[str, str, int]] = [
    *((f"{LABELS[arm]}, r = {rank}", arm, rank) for arm, rank in (("own", 16), ("own", 8), ("own", 32))),
    *((f"{LABELS['pooled']}, r = {rank}", "pooled", rank) for rank in (8, 16, 32)),
    *((f"{LABELS['lora']}, r = {rank}", "lora", rank) for rank in (1, 16)),
    ("the base model", "base", 0),
]
OTHERS: Sequence[tuple[str, str, int]] = [
    ("RawGrad of these rows, r = 16", "rawgrad", 16),
    ("LoRA-XS, r = 16", "lora_xs", 16),
    ("Random, r = 16", "random", 16),
    ("FCCA, r = 64, of which each trains 256 entries a layer", "entries", 64),
]
OWN, POOLED = ("its own basis, r = 16", "own", 16), ("one FCCA of the rows of 16 tenants, r = 16", "pooled", 16)


def of_newcomers(arms: Mapping[Arm, Lines]) -> dict[Arm, Lines]:
    """The lines of tenants that took no part in calibration."""
    return {arm: {name: own for name, own in of.items() if not TENANTS[name].calibrated} for arm, of in arms.items()}


def sharing_table(lines: Sequence[Record]) -> str:
    """Own and shared bases and LoRAs for all tenants, then for those that took no part in calibration."""
    arms = arms_of(lines)

    def size(of: Sequence[Record]) -> str:
        return f"{len({line['seed'] for line in of})}: {of[0]['disk_bytes']:,}" if "disk_bytes" in of[0] else ""

    both = [
        groups_table(some, {who: SHARING}, "seeds: bytes on disk", size)
        for who, some in (("all", arms), ("newcomers", of_newcomers(arms)))
    ]
    return "\n".join(both)


def bases_table(lines: Sequence[Record]) -> str:
    """Shared bases beside own ones, of arms with all tenants; then beside the pooled one, for newcomers alone."""
    arms = arms_of(lines)
    whole = {arm: of for arm, of in arms.items() if len(of) == len(TENANTS)}
    new = of_newcomers(arms | {("pooled", 16): arms.get(("newcomers, pooled", 16), {})})

    def size(of: Sequence[Record]) -> str:
        return next((f"{line['values']:,}: {line['memory_bytes']:,}" for line in of if "values" in line), "")

    groups: Sequence[tuple[Mapping[Arm, Lines], Groups]] = [
        (whole, {"24 tenants": [OWN, POOLED, *OTHERS]}),
        (new, {"8 newcomers": [POOLED, *OTHERS]}),
    ]
    return "\n".join(groups_table(some, of, "values: bytes", size) for some, of in groups)


if __name__ == "__main__":
    study = open_study(ArmsStudy, __doc__, TODAY)
    write_tenants(study.tenants, study.results.file.with_suffix(""))
    study.run()
