"""Three studies of 24 tenants: shared bases, newcomers that start from what others learned, compressed adapters.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/tenants_quality.py sharing --data-root DIR --work FOLDER   # hours; resumes
    python benchmarks/tenants_quality.py starts --quick --out FILE   # made-up tenants on the pocket model: does it run?

``sharing``: does one shared basis cost quality, and which basis?

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

``starts``: does it help newcomers to start from what others learned? All train on the pooled basis (rank 16, seed 42),
with all their rows and with a quarter, from zero; from the mean of the cores of the 16 calibrated tenants; from their
mean weighted by the softmax of minus each core's loss on that quarter; from the core of the lowest such loss. LoRAs of
rank 16 start as usual, or from the mean of the products of the 16, cut to rank 16. The mean loss on the newcomers'
validation rows chooses among the rates.

``compress``: what do adapters lose in one basis of them all, and is such a basis good for newcomers? Every tenant's
adapter is trained with a random start of its own, or (``one seed``) all with the same. ``own`` is a core of rank 16 on
the tenant's own basis, ``lora`` a LoRA. A line has the share of ‖ΔW‖² kept; one of the phase ``kept`` is the shares of
a number of adapters.

    learned      the cores of the 16 calibrated tenants, compressed into one basis; newcomers then train on it from zero
    compressed   the LoRAs of all tenants, compressed into one basis (every other tenant, then all, then of more seeds)
    mean         one core for everybody on that basis: the mean
    others       the LoRAs of the 16 compressed; those of the other eight put on that basis
    trained on   a compressed core, trained for one more epoch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from json import dumps
from pathlib import Path
from statistics import fmean

import torch
from peft import PeftModel
from torch import Tensor

from frozencore import Core, basis_id, frozen_core_layers, swap_core
from frozencore.adapter.core import sum_cores
from frozencore.files.fingerprint import fingerprint_model
from frozencore.maths.basis import LayerBasis
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.compress import compress
from frozencore.maths.linalg import complete_orthonormal, seeded_generator
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.tune.many.slots import held_out_losses
from frozencore.tune.rows.row import TokenRow
from harness import parser_of, study_file
from tenant_rows import QUICK_TENANTS, TENANTS, make_tenants, manifest_of
from tenant_study import (
    RANK,
    RECIPE,
    SEED,
    START_SEED,
    Adapters,
    Job,
    Results,
    Study,
    Updates,
    bytes_of,
    key,
    product_svd,
    study_model,
    zero_core,
)

Bases = Mapping[str, LayerBasis]
OWN_RATE, POOLED_RATE = 1e-2, 2e-2
LORA_RATES = {1: 1.6e-2, 2: 2e-3, 4: 2e-3, 16: 2e-3}
"""The rates that ``sharing`` found, by which the other studies train."""
FIRST_RATES = {
    "own": 1e-2, "pooled": 1e-2, "rawgrad": 2e-2, "random": 4e-2, "lora_xs": 2e-2, "entries": 4e-2, "lora": 4e-3,
}  # fmt: skip
"""Where a search begins: this rate, twice it and half of it."""
SEEDS = (SEED, 43, 44)
WIDER = 4
"""How many times the rank of the basis of entries is that of the others; the values that train are as many."""
INDEX_BYTES = 2
FULL: Sequence[tuple[Sequence[tuple[str, int]], Sequence[int]]] = [
    ([("own", RANK), ("pooled", RANK), ("lora", 1), ("lora", RANK)], SEEDS),
    ([(arm, rank) for rank in (8, 32) for arm in ("own", "pooled")], SEEDS),
    ([("rawgrad", RANK), ("random", RANK), ("entries", WIDER * RANK), ("lora_xs", RANK)], (SEED,)),
]
"""Arms and their seeds, what counts most first."""
QUICK = [([("own", 4), ("pooled", 4), ("random", 4), ("entries", WIDER * 4), ("lora", 1)], (SEED,))]
STARTS = ("zero", "mean", "weighted", "nearest")
LEARNED_RATES = (2e-2, 1e-2, 4e-2)
"""Rates on a learned basis; the mean loss on the newcomers' validation rows chooses one."""
TRAINED_ON_RATE = 5e-3
SEEDS_KEPT = (2, 5, 10)
"""Numbers of seeds whose LoRAs show how the share that a basis keeps falls."""


class Sharing(Study):
    """The study of shared bases; the moments of a seed are held for all arms and ranks."""

    held: tuple[int, dict[tuple[str, Set[MomentName]], dict[str, LayerMoments]]] = (0, {})

    def moments(self, name: str, seed: int = SEED, needs: Set[MomentName] = CAPTURE_NEEDS) -> dict[str, LayerMoments]:
        if self.held[0] != seed:
            self.held = seed, {}
        at = name, needs - CAPTURE_NEEDS
        if at not in self.held[1]:
            self.held[1][at] = super().moments(name, seed, needs | CAPTURE_NEEDS)
        return self.held[1][at]

    def run(self) -> None:
        self.measure_base()
        for arms, seeds in QUICK if self.quick else FULL:
            for seed in seeds:
                for arm, rank in arms:
                    searched = rank if self.quick or arm in ("lora", "entries") else RANK
                    rate = self.searched_rate(FIRST_RATES[arm], arm, searched, self.adapters(arm, searched, SEED))
                    jobs = [(name, rate) for name in self.everyone]
                    self.measure(arm, rank, jobs, self.adapters(arm, rank, seed), seed=seed)

    def adapters(self, arm: str, rank: int, seed: int) -> Callable[[Sequence[Job]], Adapters]:
        if arm in ("lora", "own"):
            return partial(self.loras if arm == "lora" else self.on_own_bases, rank=rank, seed=seed)
        if arm == "entries":
            return partial(self.entries, rank, seed)
        constructor = "fcca" if arm == "pooled" else arm
        return lambda jobs: self.on(self.basis(constructor, rank, seed), rank, jobs, seed)

    def entries(self, rank: int, seed: int, jobs: Sequence[Job]) -> Adapters:
        """Tenants that train some entries of their cores; the others stay zero."""
        basis, masks = self.basis("fcca", rank, seed), self.masks(rank, seed)
        with self.adapted("random", rank, 0, basis) as model:
            layers, sizes = frozen_core_layers(model, "default"), bytes_of(model, shared=True)
            values = (rank // WIDER) ** 2 * len(layers)
            memory = values * (torch.float32.itemsize + INDEX_BYTES)
            sizes["disk_bytes"] += memory - sizes["memory_bytes"]
            for name, rate in jobs:
                swap_core(model, zero_core(model))
                hooks = [
                    layer.core("default").register_hook(partial(torch.mul, masks[f"{name} {place}"]))
                    for place, layer in layers.items()
                ]
                about = self.train_alone(model, name, rate, seed)
                for hook in hooks:
                    hook.remove()
                yield model, (name, rate), {**sizes, **about, "values": values, "memory_bytes": memory}

    def masks(self, rank: int, seed: int) -> dict[str, Tensor]:
        """Which entries of each layer's core a tenant trains, under ``<tenant> <layer>``."""

        def made() -> dict[str, Tensor]:
            basis, chosen = self.basis("fcca", rank, seed), {}
            for name in self.everyone:
                for layer, found in self.moments(name, seed).items():
                    size = (basis[f"{layer}.P"].float().mT @ found.G @ basis[f"{layer}.Q"].float()).abs().flatten()
                    mask = torch.zeros_like(size, dtype=torch.bool)
                    mask[size.topk((rank // WIDER) ** 2).indices] = True
                    chosen[f"{name} {layer}"] = mask.view(rank, rank)
            return chosen

        return self.stored(f"entries-{rank}-{seed}", made)


class Starts(Study):
    """The study of newcomers' starts."""

    def run(self) -> None:
        for rate in (POOLED_RATE, POOLED_RATE / 2):
            for parts in (1, 4):
                for start in STARTS:
                    arm = f"start {start}" + (", a quarter" if parts > 1 else "")
                    self.measure_newcomers(arm, rate, partial(self.started, start, parts))
        for rate in (LORA_RATES[RANK], LORA_RATES[RANK] / 2):
            for start in STARTS[:2]:
                self.measure_newcomers(f"lora, start {start}", rate, partial(self.started_loras, start))

    def measure_newcomers(self, arm: str, rate: float, adapters: Callable[[Sequence[Job]], Adapters]) -> None:
        self.measure(arm, self.rank, [(name, rate) for name in self.newcomers], adapters, validates=True)

    def part_of(self, name: str, parts: int) -> list[TokenRow]:
        """The first rows of a tenant; the answers take turns in them."""
        rows = self.train_rows[name]
        return rows[: len(rows) // parts]

    @cached_property
    def learned(self) -> dict[str, Core]:
        """The cores of the calibrated tenants on the pooled basis."""
        missing = [name for name in self.calibrated if not (self.work / f"cores/{name}.safetensors").exists()]
        if missing:
            with self.adapted("random", self.rank, 0, self.basis("fcca", self.rank)) as model:
                done = self.train_cores(model, [(name, POOLED_RATE) for name in missing])
            for name, _ in done:
                core = done[name, POOLED_RATE].core
                assert core is not None
                self.stored(f"cores/{name}", partial(dict, core.tensors))
        return {name: Core.read(name, self.stored(f"cores/{name}", dict)) for name in self.calibrated}

    def likeness(self, model: PeftModel) -> dict[str, Tensor]:
        """Minus the loss of each learned core on a quarter of each newcomer's rows, in the order of the cores."""

        def measured() -> dict[str, Tensor]:
            rows, pad = [self.part_of(name, 4) for name in self.newcomers], self.encoder.pad_id
            losses = []
            for core in self.learned.values():
                swap_core(model, core)
                losses.append(held_out_losses(model, rows, pad_id=pad))
            return dict(zip(self.newcomers, -torch.tensor(losses).mT, strict=True))

        return self.stored("likeness", measured)

    def start(self, arm: str, name: str, model: PeftModel) -> Core:
        """The core from which a newcomer starts."""
        if arm == "zero":
            return zero_core(model)
        every = list(self.learned.values())
        alike = self.likeness(model)[name]
        if arm == "nearest":
            return every[int(alike.argmax())]
        weights = alike.softmax(0) if arm == "weighted" else torch.full_like(alike, 1 / len(alike))
        return sum_cores(every, list(self.learned), weights.tolist())

    def started(self, start: str, parts: int, jobs: Sequence[Job]) -> Adapters:
        """Cores on the pooled basis that train from a start, on a part of the rows."""
        basis, _ = self.basis("fcca", self.rank), self.learned  # before the model has an adapter
        with self.adapted("random", self.rank, 0, basis) as model:
            for name, rate in jobs:
                swap_core(model, self.start(start, name, model))
                yield from self.cores(model, [(name, rate)], rows={name: self.part_of(name, parts)})

    def started_loras(self, start: str, jobs: Sequence[Job]) -> Adapters:
        return self.loras(
            jobs, self.rank, start_seed=START_SEED, factors=self.mean_product if start == "mean" else None
        )

    @cached_property
    def mean_product(self) -> Updates:
        """The mean of the updates of the calibrated tenants' LoRAs, cut to the rank of one."""
        every = [self.update("lora", self.rank, name, LORA_RATES[self.rank]) for name in self.calibrated]
        return {layer: mean_of([own[layer] for own in every], self.rank) for layer in every[0]}


def mean_of(products: Sequence[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """The best factors B and A of a rank for the mean of B A, from the factors alone."""
    B, A = torch.cat([B for B, _ in products], dim=1), torch.cat([A for _, A in products])
    U, S, V = product_svd(B, A / len(products))
    root = S[:rank].sqrt()
    return U[:, :rank] * root, (V[:, :rank] * root).mT


class Compressing(Study):
    """The study of compression."""

    @property
    def ranks(self) -> tuple[int, int, int]:
        return (2, 4, 8) if self.quick else (16, 32, 64)

    def run(self) -> None:
        sixteen, rank, half = self.calibrated, self.rank, self.everyone[1::2][:10]
        own = self.trained("own", rank, sixteen)
        self.put_on("own, learned", own, own, rank)
        self.newcomers_on("learned", own, rank, LEARNED_RATES[:1])
        self.trained("own", rank, [name for name in self.newcomers if name.startswith("sst2")])
        loras = self.trained("lora", rank, half)
        for other in self.ranks[:2]:
            self.put_on("lora, compressed", loras, loras, other)
        self.kept(loras)
        self.trained("own", rank, self.newcomers)
        self.put_on("lora, mean", loras, loras, rank, form="mean")
        self.newcomers_on("pooled", None, rank, (POOLED_RATE,))
        self.measure_base()
        self.newcomers_on("learned", own, rank, LEARNED_RATES[1:])
        self.newcomers_on("learned", own, 2 * rank, LEARNED_RATES)
        self.put_on("own, learned, trained on", own, own, rank, form="trained")
        self.put_on("own, learned", own, own, 2 * rank)
        loras = self.trained("lora", rank, self.everyone)
        for other in self.ranks:
            self.put_on("lora of all, compressed", loras, loras, other)
        self.kept(loras)
        some = {name: loras[name] for name in sixteen}
        self.put_on("lora, others", some, {name: loras[name] for name in self.newcomers}, rank)
        small = self.trained("lora", 1, self.everyone)
        for other in self.ranks:
            self.put_on("lora 1, compressed", small, small, other)
        for other in (rank, 1):
            same = self.trained("lora, one seed", other, self.everyone)
            for cut in self.ranks:
                self.put_on(f"lora of rank {other}, one seed, compressed", same, same, cut)
        kept_at, rate = SEEDS_KEPT[: 1 if self.quick else None], LORA_RATES[rank]
        for number in range(2, kept_at[-1] + 1):
            seed = SEED + number - 1
            loras |= {f"{name} {seed}": self.update("lora", rank, name, rate, seed) for name in self.everyone}
            if number in kept_at:
                self.kept(loras, parts=(1,))

    def trained(self, arm: str, rank: int, names: Sequence[str]) -> dict[str, Updates]:
        """The updates of these tenants, of which those that are not there are trained and scored."""
        rate = OWN_RATE if arm == "own" else LORA_RATES[rank]
        return {name: self.update(arm, rank, name, rate) for name in names}

    # ------------------------------------------------------------------------------------------------ one basis of them

    def compressed(self, updates: Mapping[str, Updates], rank: int) -> dict[str, LayerBasis]:
        layers = next(iter(updates.values()))
        return {layer: filled(compress([own[layer] for own in updates.values()], rank), rank) for layer in layers}

    def projected(self, own: Updates, basis: Bases, rank: int) -> tuple[dict[str, Tensor], float]:
        """The cores of an update on a basis, at the scale of an adapter, and the share of the update that they keep."""
        cores = {layer: (one.P.mT @ own[layer][0]) @ (own[layer][1] @ one.Q) for layer, one in basis.items()}
        whole = sum(float((B @ A).square().sum()) for B, A in own.values())
        kept = sum(float(R.square().sum()) for R in cores.values()) / whole
        return {layer: R * rank / 16 for layer, R in cores.items()}, kept

    def put_on(
        self, arm: str, sources: Mapping[str, Updates], of: Mapping[str, Updates], rank: int, *, form: str = "own"
    ) -> None:
        """Measure updates as cores on the basis of the sources.

        Args:
            form: ``own`` cores, the ``mean`` core for everybody, or own cores ``trained`` for one more epoch.
        """

        def adapters(jobs: Sequence[Job]) -> Adapters:
            basis = self.compressed(sources, rank)
            cores, kept = {}, {}
            for name, own in of.items():
                cores[name], kept[name] = self.projected(own, basis, rank)
            if form == "mean":
                mean = {layer: torch.stack([own[layer] for own in cores.values()]).mean(0) for layer in basis}
                cores = dict.fromkeys(cores, mean)
            with self.adapted("random", rank, 0, tensors_of(basis)) as model:
                for name, rate in jobs:
                    swap_core(model, Core.of(basis_id(model), cores[name]))
                    about = {"sources": len(sources)} | ({"kept": kept[name]} if form == "own" else {})
                    if form == "trained":
                        ((_, _, about),) = self.cores(model, [(name, TRAINED_ON_RATE)], epochs=1)
                    yield model, (name, rate), about

        self.measure(arm, rank, [(name, None) for name in of], adapters)

    def kept(self, sources: Mapping[str, Updates], parts: Sequence[int] = (2, 1)) -> None:
        """The share that all of them, or one in ``parts``, keep at each rank."""
        for number in sorted({max(1, len(sources) // part) for part in parts}):
            some = {name: sources[name] for name in list(sources)[:: len(sources) // number][:number]}
            for rank in self.ranks:
                line = key("lora", rank, str(number), phase="kept")
                if not self.results.get(line):
                    basis = self.compressed(some, rank)
                    shares = [self.projected(own, basis, rank)[1] for own in some.values()]
                    self.results.add({**line, "kept": fmean(shares), "least": min(shares)})

    def newcomers_on(self, arm: str, sources: Mapping[str, Updates] | None, rank: int, rates: Sequence[float]) -> None:
        """Measure newcomers that train from zero on the basis of the sources; None is the pooled basis."""

        def adapters(jobs: Sequence[Job]) -> Adapters:
            bases = self.basis("fcca", rank) if sources is None else tensors_of(self.compressed(sources, rank))
            return self.on(bases, rank, jobs)

        for rate in rates:
            jobs = [(name, rate) for name in self.newcomers]
            self.measure(f"newcomers, {arm}", rank, jobs, adapters, validates=True)


def filled(found: LayerBasis, rank: int) -> LayerBasis:
    """The basis with random directions up to this rank, so that all layers have one."""
    P, Q = (complete_orthonormal(X, rank, seeded_generator(0, "compress", "filled")) for X in (found.P, found.Q))
    return replace(found, P=P, Q=Q)


def tensors_of(basis: Bases) -> dict[str, Tensor]:
    return {f"{layer}.{side}": getattr(one, side) for layer, one in basis.items() for side in "PQ"}


STUDIES: Mapping[str, tuple[type[Study], str]] = {
    "sharing": (Sharing, "sharing-quality"),
    "starts": (Starts, "sharing-quality"),
    "compress": (Compressing, "compress-quality"),
}
"""The studies and the names of their files of results."""


def main() -> None:
    parser = parser_of(__doc__, "NAME-quality", "jsonl")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--work", type=Path, help="Folder for trained adapters and bases; with --quick beside --out.")
    options = parser.parse_args()
    study, options.name = STUDIES[options.study]
    out, dtype = study_file(options), "float32" if options.quick else "bfloat16"
    if options.work is None and not options.quick:
        parser.error("Give --work FOLDER.")
    model, encoder, here = study_model(options, dtype)
    if options.quick:
        tenants = make_tenants(QUICK_TENANTS, None, validation=8, held_out=8)
    else:
        tenants = make_tenants(TENANTS, options.data_root)
    common = {
        "model": fingerprint_model(model)[:16],
        "dtype": dtype,
        **here,
        "rows": sha256(dumps(manifest_of(tenants)).encode()).hexdigest()[:16],
        "recipe": RECIPE,
    }
    study(model, encoder, tenants, Results(out, common), options.work or out.with_suffix(".work"), options.quick).run()


if __name__ == "__main__":
    main()
