"""What do tenants lose when their adapters are compressed into one basis, and is such a basis good for newcomers?

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/compress_quality.py --data-root DIR --work FOLDER    # goes on where it stopped
    python benchmarks/compress_quality.py --quick --out FILE     # made-up tenants on the pocket model: does it run?

The tenants, rows, recipe and rates are those of tenants_quality.py (seed 42). Every tenant's adapter is trained with a
random start of its own. ``own`` is a core of rank 16 on the tenant's own basis, ``lora`` a LoRA.

    learned      the cores of the 16 calibrated tenants, compressed into one basis; newcomers then train on it from zero
    compressed   the LoRAs of all tenants, compressed into one basis
                 (first every other tenant, then all)
    mean         one core for everybody on that basis: the mean
    others       the LoRAs of the 16 compressed; those of the other eight put on that basis
    trained on   a compressed core, trained for one more epoch

A line is one tenant in one arm at one rank: loss in nats per answer token, accuracy, share of ‖ΔW‖² kept. A line of the
phase ``kept`` is the shares of a number of adapters, without scores. FOLDER keeps the trained adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

import torch
from peft import PeftModel
from torch import Tensor

from frozencore import calibrate, swap_core
from frozencore.maths.compress import Compression, compress
from frozencore.tune.scoring.forward import unload_adapter
from harness import Record, table
from tenant_study import (
    POOLED_RATE,
    Groups,
    Study,
    Updates,
    arms_of,
    factors_of,
    groups_table,
    open_study,
    pairs_of,
)  # fmt: skip

OWN_RATE = 1e-2
LEARNED_RATES = (2e-2, 1e-2, 4e-2)
"""Rates on a learned basis; the mean loss on the newcomers' validation rows chooses one."""
TRAINED_ON_RATE = 5e-3
Bases = Mapping[str, Compression]


class CompressStudy(Study):
    """The study of compression."""

    @property
    def ranks(self) -> tuple[int, int, int]:
        return (2, 4, 8) if self.quick else (16, 32, 64)

    def run(self) -> None:
        """Measure everything that is missing, what decides most first."""
        sixteen, rank, half = self.calibrated, self.rank, self.everyone[1::2][:10]
        own = self.trained("own", rank, sixteen)
        self.score_on("own, learned", own, sixteen, rank)
        self.newcomers_on("learned", own, rank, LEARNED_RATES[:1])
        self.trained("own", rank, [name for name in self.newcomers if name.startswith("sst2")])
        loras = self.trained("lora", rank, half)
        for other in self.ranks[:2]:
            self.score_on("lora, compressed", loras, half, other)
        self.kept(loras)
        self.trained("own", rank, self.newcomers)
        self.score_mean(loras, rank)
        self.newcomers_on("pooled", None, rank, (POOLED_RATE,))
        self.base()
        self.newcomers_on("learned", own, rank, LEARNED_RATES[1:])
        self.newcomers_on("learned", own, 2 * rank, LEARNED_RATES)
        self.train_on("own, learned, trained on", own, rank)
        self.score_on("own, learned", own, sixteen, 2 * rank)
        loras = self.trained("lora", rank, self.everyone)
        for other in self.ranks:
            self.score_on("lora of all, compressed", loras, self.everyone, other)
        self.kept(loras)
        self.score_on("lora, others", {name: loras[name] for name in sixteen}, self.newcomers, rank, of=loras)
        small = self.trained("lora", 1, self.everyone)
        for other in self.ranks:
            self.score_on("lora 1, compressed", small, self.everyone, other)

    def trained(self, arm: str, rank: int, names: Sequence[str]) -> dict[str, Updates]:
        """The updates of these tenants, of which those that are not there are trained and scored."""

        def own(name: str) -> dict[str, Tensor]:
            moments = self.moments(name)
            model = self.adapter("fcca", rank)
            calibrate(model, moments=moments, progress=False)
            swap_core(model, self.train_cores(model, [(name, OWN_RATE)])[name, OWN_RATE].cores)
            self.add_score(model, "own", rank, name)
            factors = factors_of(model)
            unload_adapter(model)
            return factors

        return {
            name: pairs_of(
                self.stored(f"own-{rank}/{name}", partial(own, name)) if arm == "own" else self.own_lora(name, rank)
            )
            for name in names
        }

    # ------------------------------------------------------------------------------------------------ one basis of them

    def compressed(self, updates: Mapping[str, Updates], rank: int) -> dict[str, Compression]:
        layers = next(iter(updates.values()))
        return {layer: compress([own[layer] for own in updates.values()], rank) for layer in layers}

    def on_learned(self, basis: Bases, rank: int) -> PeftModel:
        return self.on({f"{layer}.{side}": getattr(one, side) for layer, one in basis.items() for side in "PQ"}, rank)

    def projected(self, own: Updates, basis: Bases, rank: int) -> tuple[dict[str, Tensor], float]:
        """The cores of an update on a basis, at the scale of an adapter, and the share of the update that they keep."""
        cores = {layer: (one.P.mT @ own[layer][0]) @ (own[layer][1] @ one.Q) for layer, one in basis.items()}
        whole = sum(float((B @ A).square().sum()) for B, A in own.values())
        kept = sum(float(R.square().sum()) for R in cores.values()) / whole
        return {layer: R * rank / 16 for layer, R in cores.items()}, kept

    def without_line(
        self, arm: str, sources: Mapping[str, Updates], names: Sequence[str], rank: int
    ) -> Iterator[tuple[PeftModel, Bases, str]]:
        """The model on the basis of the sources and that basis, for each tenant without a line."""
        missing = [name for name in names if not self.has(arm, rank, name)]
        if not missing:
            return
        basis = self.compressed(sources, rank)
        model = self.on_learned(basis, rank)
        for name in missing:
            yield model, basis, name
        unload_adapter(model)

    def score_on(
        self,
        arm: str,
        sources: Mapping[str, Updates],
        names: Sequence[str],
        rank: int,
        of: Mapping[str, Updates] | None = None,
    ) -> None:
        """Score tenants' updates on the basis of the sources."""
        for model, basis, name in self.without_line(arm, sources, names, rank):
            cores, kept = self.projected((of or sources)[name], basis, rank)
            swap_core(model, cores)
            self.add_score(model, arm, rank, name, kept=kept, sources=len(sources))

    def score_mean(self, sources: Mapping[str, Updates], rank: int) -> None:
        for model, basis, name in self.without_line("lora, mean", sources, list(sources), rank):
            every = [self.projected(own, basis, rank)[0] for own in sources.values()]
            swap_core(model, {layer: torch.stack([cores[layer] for cores in every]).mean(0) for layer in basis})
            self.add_score(model, "lora, mean", rank, name, sources=len(sources))

    def train_on(self, arm: str, sources: Mapping[str, Updates], rank: int) -> None:
        """Score compressed cores that trained for one more epoch."""
        for model, basis, name in self.without_line(arm, sources, list(sources), rank):
            swap_core(model, self.projected(sources[name], basis, rank)[0])
            job = name, TRAINED_ON_RATE
            swap_core(model, self.train_cores(model, [job], epochs=1)[job].cores)
            self.add_score(model, arm, rank, name)

    def kept(self, sources: Mapping[str, Updates]) -> None:
        """The share that all and half of them keep at each rank."""
        for number in sorted({max(1, len(sources) // 2), len(sources)}):
            some = {name: sources[name] for name in list(sources)[:: len(sources) // number][:number]}
            for rank in self.ranks:
                if not self.has("lora", rank, str(number), phase="kept"):
                    basis = self.compressed(some, rank)
                    shares = [self.projected(own, basis, rank)[1] for own in some.values()]
                    self.add("lora", rank, str(number), phase="kept", kept=fmean(shares), least=min(shares))

    def newcomers_on(self, arm: str, sources: Mapping[str, Updates] | None, rank: int, rates: Sequence[float]) -> None:
        """Train the newcomers from zero at each rate; their validation rows are scored too.

        Args:
            sources: The updates whose basis it is; None for the pooled basis.
        """
        named = f"newcomers, {arm}"
        for rate in rates:
            missing = [(name, rate) for name in self.newcomers if not self.has(named, rank, name, rate)]
            if not missing:
                continue
            if sources is None:
                model = self.on(self.basis("fcca", rank), rank)
            else:
                model = self.on_learned(self.compressed(sources, rank), rank)
            for (name, _), trained in self.train_cores(model, missing).items():
                swap_core(model, trained.cores)
                validation = self.score(model, name, "validation")["loss"]
                self.add_score(model, named, rank, name, rate, validation_loss=validation)
            unload_adapter(model)


GROUPS: Groups = {
    "cores on own bases, of 16 tenants": [
        ("their own basis, r = 16", "own", 16),
        ("compressed, r = 16", "own, learned", 16),
        ("compressed, r = 32", "own, learned", 32),
        ("compressed, r = 16, trained on for an epoch", "own, learned, trained on", 16),
    ],
    "newcomers": [
        ("their own basis, r = 16", "own", 16),
        ("one FCCA of the rows of 16 tenants, r = 16", "newcomers, pooled", 16),
        ("learned from the cores of 16 tenants, r = 16", "newcomers, learned", 16),
        ("learned from the cores of 16 tenants, r = 32", "newcomers, learned", 32),
    ],
    "LoRAs of r = 16, every other tenant": [
        ("the LoRA", "lora", 16),
        ("compressed, r = 16", "lora, compressed", 16),
        ("compressed, r = 32", "lora, compressed", 32),
        ("the mean core for everybody, r = 16", "lora, mean", 16),
    ],
    "LoRAs of r = 16, all tenants": [
        ("the LoRA", "lora", 16),
        *((f"compressed, r = {rank}", "lora of all, compressed", rank) for rank in (16, 32, 64)),
    ],
    "LoRAs of r = 16, on a basis of 16 others": [
        ("the LoRA", "lora", 16),
        ("put on it, r = 16", "lora, others", 16),
    ],
    "LoRAs of r = 1, all tenants": [
        ("the LoRA", "lora", 1),
        *((f"compressed, r = {rank}", "lora 1, compressed", rank) for rank in (16, 32, 64)),
    ],
}


def table_of(lines: Sequence[Record]) -> str:
    """Every group, with the shares kept."""

    def kept(own: Sequence[Record]) -> str:
        shares = [line["kept"] for line in own if "kept" in line]
        return f"{fmean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})" if shares else ""

    return groups_table(arms_of(lines), GROUPS, "share kept", kept)


def kept_table(lines: Sequence[Record]) -> str:
    """The share kept by number of LoRAs and rank."""
    found = {(int(line["tenant"]), line["rank"]): line for line in lines if line["phase"] == "kept"}
    if not found:
        return "Not measured yet.\n"
    numbers, ranks = (sorted({key[side] for key in found}) for side in (0, 1))
    rows = [
        [f"{number} LoRAs", *(f"{found[number, r]['kept']:.0%} ({found[number, r]['least']:.0%})" for r in ranks)]
        for number in numbers
    ]
    return table(["share kept, mean (least)", *(f"r = {rank}" for rank in ranks)], rows)


if __name__ == "__main__":
    study = open_study(CompressStudy, __doc__, "compress-quality")
    study.run()
