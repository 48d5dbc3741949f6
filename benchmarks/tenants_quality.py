"""Does one shared basis cost quality? 24 tenants on SmolLM2 with cores on their own basis, on a shared one, or LoRAs.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/tenants_quality.py --data-root DIR    # hours; goes on where it was stopped
    python benchmarks/tenants_quality.py --quick --out FILE     # made-up tenants on the pocket model: does it run?

The tenants are those of tenant_rows.py. Arms: ``own`` is FCCA on each tenant's own rows; ``pooled`` is one FCCA of the
rows of all calibrated tenants; ``lora`` trains a LoRA for each tenant. All train by one recipe. The learning
rate of each arm is searched on validation rows of three tenants, by factors of two until the best one has others on
both sides, at rank 16 (LoRA: at each rank) and seed 42, and holds for all tenants, ranks and seeds.

A line of the results is one tenant in one arm, at one rank and seed: loss in nats per answer token without the end
token, accuracy, and bytes. Lines that are there are not
measured again. Prompts are plain, and attention is ``eager``, which on a CPU trains short rows faster.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from contestants import ATTENTION
from frozencore import calibrate, frozen_core_layers, save_basis, swap_core
from frozencore.adapter.bases import basis_fingerprint, get_bases
from frozencore.calibration.batches import Batch
from frozencore.calibration.collect import collect_moments
from frozencore.files.fingerprint import fingerprint_model
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.moments import LayerMoments
from frozencore.tune.load import load_model
from frozencore.tune.many.tenant import Tenant as CoreTenant
from frozencore.tune.many.tenant import Trained
from frozencore.tune.many.train import train_many
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.provenance import provenance
from frozencore.tune.rows import Example, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.token_batches import make_batches
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.tasks.splits import calibration_rows
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import overhead_tokens_of
from harness import RESULTS, Record, Results, best_rate, lines_of, parser_of, table
from tenant_rows import SEARCHED, TENANTS, Tenant, TenantPlan, make_tenants, manifest_of, write_tenants

CORE_ARMS = {"own": "fcca", "pooled": "fcca"}
LABELS = {"own": "its own basis", "pooled": "one basis of the rows of 16 tenants", "lora": "a LoRA"}
RATES = {"own": 1e-2, "lora": 4e-3}
"""Where a search begins: this rate, twice it and half of it."""
RANK, SEEDS = 16, (42, 43, 44)
ROWS_A_STEP, FEWEST_STEPS, WARMUP = 8, 16, 0.1
CALIBRATION = 64  # rows of each tenant
MOST_RATES = 6
DRAWS = 10_000  # of the bootstrap

Arm = tuple[str, int]
"""The name of an arm and its rank."""
Moments = Mapping[str, LayerMoments]


@dataclass(frozen=True)
class Scale:
    """The size of the study."""

    arms: Sequence[Arm]
    more: Sequence[Arm] = ()
    seeds: Sequence[int] = SEEDS
    searched: Sequence[str] = SEARCHED


FULL = Scale(
    arms=[("own", RANK), ("pooled", RANK), ("lora", 1), ("lora", RANK)],
    more=[(arm, rank) for rank in (8, 32) for arm in CORE_ARMS],
)
QUICK = Scale(arms=[*((arm, 4) for arm in CORE_ARMS), ("lora", 1)], seeds=(42,), searched=("sentiment-a",))
QUICK_TENANTS = {
    f"{kind}-{letter}": TenantPlan(f"pocket-{kind}", 24, "made up", calibrated=letter == "a")
    for kind in ("sentiment", "entailment")
    for letter in "ab"
}


@dataclass
class Study:
    """The model, the tenants as text and as tokens, and what has been measured."""

    model: PreTrainedModel
    encoder: PromptEncoder
    tenants: Mapping[str, Tenant]
    results: Results
    scale: Scale
    _moments: tuple[int, dict[str, Moments]] | None = None
    _bases: dict[tuple[str, int, int], dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def train_rows(self) -> dict[str, list[TokenRow]]:
        return {name: self.tokens(tenant.rows["train"]) for name, tenant in self.tenants.items()}

    @property
    def calibrated(self) -> list[str]:
        return [name for name, tenant in self.tenants.items() if tenant.plan.calibrated]

    def tokens(self, examples: Sequence[Example]) -> list[TokenRow]:
        return self.encoder.training_rows([self.encoder.render(example) for example in examples])

    def recipe(self, name: str, rate: float, seed: int) -> Recipe:
        """As many epochs as make sixteen steps."""
        rows = len(self.train_rows[name])
        epochs = math.ceil(FEWEST_STEPS / math.ceil(rows / ROWS_A_STEP))
        return Recipe(rate, WARMUP, epochs=epochs, batch_size=ROWS_A_STEP, accumulation=1, seed=seed)

    def calibration_batches(self, name: str, seed: int) -> list[Batch]:
        """Batches of rows of like length, so that little is padding."""
        rows = self.tokens(calibration_rows(self.tenants[name].rows["train"], CALIBRATION, seed=seed))
        rows.sort(key=lambda row: len(row.input_ids))
        return list(make_batches(rows, pad_id=self.encoder.pad_id, batch_size=ROWS_A_STEP))

    def adapter(self, arm: str, rank: int, seed: int, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        options = AdapterOptions(rank, ATTENTION, seed, {})
        return METHODS[CORE_ARMS.get(arm, arm)].add(self.model, options, bases)

    def moments(self, seed: int) -> dict[str, Moments]:
        """The moments of each tenant's calibration rows, kept for all arms and ranks of a seed."""
        if self._moments is None or self._moments[0] != seed:
            self._moments = None
            bare = self.adapter("random", 1, 0)
            names = list(frozen_core_layers(bare, "default"))
            unload_adapter(bare)
            layers = {name: self.model.get_submodule(name) for name in names}
            found = {
                name: collect_moments(self.model, self.calibration_batches(name, seed), layers, needs=CAPTURE_NEEDS)
                for name in self.tenants
            }
            self._moments = seed, found
        return self._moments[1]

    def with_basis(self, arm: str, rank: int, seed: int) -> PeftModel:
        """The model with the shared basis of an arm, which is computed once; of ``own`` one without a basis yet."""
        if (arm, rank, seed) in self._bases:
            return self.adapter(arm, rank, seed, self._bases[arm, rank, seed])
        model = self.adapter(arm, rank, seed)
        if arm == "pooled":
            pooled: dict[str, LayerMoments] = {}
            for name in self.calibrated:
                for layer, found in self.moments(seed)[name].items():
                    pooled[layer] = pooled[layer] + found if layer in pooled else found
            calibrate(model, moments=pooled, progress=False)
        if arm != "own":
            self._bases[arm, rank, seed] = get_bases(model)
        return model

    def score(self, model: Any, name: str, part: str) -> Record:
        """Loss in nats per token of the right answers, and the share of rows whose right answer is the likeliest."""
        examples = self.tenants[name].rows[part]
        predictions = predict_choices(model, self.encoder, examples)
        tokens = self.encoder.choice_rows([self.encoder.render(example) for example in examples])
        gold = [example.choices.index(example.completion) for example in examples]
        nats = -sum(one.logprobs[place] for one, place in zip(predictions, gold, strict=True))
        count = sum(len(row.choice_ids[place]) for row, place in zip(tokens, gold, strict=True))
        return {"loss": nats / count, "accuracy": fmean(one.correct for one in predictions)}

    def run(self) -> None:
        """Measure everything that is missing, what counts most first."""
        for name in self.tenants:
            if not self.results.has(phase="base", tenant=name):
                self.results.add(phase="base", tenant=name, **self.score(self.model, name, "held-out"))
        for arms, searched in ((self.scale.arms, None), (self.scale.more, RANK)):
            for seed in self.scale.seeds:
                for arm, rank in arms:
                    rate = self.search(arm, searched or rank)
                    named = {"phase": "final", "arm": arm, "rank": rank, "seed": seed}
                    self.measure(named, [(tenant, rate) for tenant in self.tenants], "held-out")

    def search(self, arm: str, rank: int) -> float:
        """The learning rate with the lowest mean loss on validation rows of some tenants."""
        named = {"phase": "search", "arm": arm, "rank": rank, "seed": SEEDS[0]}

        def loss(tenant: str, rate: float) -> float:
            return self.results.get(**named, tenant=tenant, learning_rate=rate)["loss"]

        def losses_of(rates: list[float]) -> dict[float, float]:
            self.measure(named, [(name, rate) for rate in rates for name in self.scale.searched], "validation")
            return {rate: fmean(loss(name, rate) for name in self.scale.searched) for rate in rates}

        return best_rate(RATES["lora" if arm == "lora" else "own"], losses_of, MOST_RATES)[0]

    def measure(self, named: Record, jobs: Sequence[tuple[str, float]], part: str) -> None:
        """Train and score those tenants at those learning rates that have no line yet."""
        missing = [
            (tenant, rate) for tenant, rate in jobs if not self.results.has(**named, tenant=tenant, learning_rate=rate)
        ]
        arm, rank, seed = named["arm"], named["rank"], named["seed"]
        for tenant, rate, about, found in self.trained(arm, rank, seed, missing, part) if missing else ():
            more = about if part == "held-out" else {}
            self.results.add(**named, tenant=tenant, learning_rate=rate, **found, **more)

    def trained(
        self, arm: str, rank: int, seed: int, jobs: Sequence[tuple[str, float]], part: str
    ) -> Iterator[tuple[str, float, Record, Record]]:
        """Each tenant with its learning rate, what its adapter is, and what it scores on a part of its rows."""
        if arm == "lora":
            for name, rate in jobs:
                yield name, rate, *self.lora(name, rate, rank, seed, part)
            return
        moments = self.moments(seed)  # before the model has an adapter
        model = self.with_basis(arm, rank, seed)
        try:
            if arm != "own":
                yield from self.cores(model, jobs, seed, part, shared=True)
                return
            for name in dict.fromkeys(name for name, _ in jobs):
                calibrate(model, moments=moments[name], reset=True, progress=False)
                yield from self.cores(model, [job for job in jobs if job[0] == name], seed, part, shared=False)
        finally:
            unload_adapter(model)

    def cores(
        self, model: PeftModel, jobs: Sequence[tuple[str, float]], seed: int, part: str, *, shared: bool
    ) -> Iterator[tuple[str, float, Record, Record]]:
        """Tenants that train together on the basis of the model."""
        together = {
            f"{name} {rate}": CoreTenant(self.train_rows[name], self.recipe(name, rate, seed)) for name, rate in jobs
        }
        done: dict[str, Trained] = {}
        train_many(model, together, done.update, pad_id=self.encoder.pad_id)
        basis = basis_fingerprint(model)
        sizes = bytes_of(model, shared=shared)
        for name, rate in jobs:
            trained = done[f"{name} {rate}"]
            swap_core(model, trained.cores)
            about = {
                **sizes,
                "training_bytes": trained.report.state_held_bytes,
                "steps": trained.report.num_steps,
                "train_loss": trained.report.final_loss,
                "basis": basis,
            }
            if trained.diverged:
                about["diverged"] = trained.diverged
            yield name, rate, about, self.score(model, name, part)

    def lora(self, name: str, rate: float, rank: int, seed: int, part: str) -> tuple[Record, Record]:
        model = self.adapter("lora", rank, seed)
        try:
            recipe = replace(self.recipe(name, rate, seed), overhead_tokens=overhead_tokens_of(self.model))
            report = train(model, self.train_rows[name], recipe, pad_id=self.encoder.pad_id)
            about = {
                **bytes_of(model, shared=False),
                "training_bytes": report.state_held_bytes,
                "steps": report.num_steps,
                "train_loss": report.final_loss,
            }
            return about, self.score(model, name, part)
        finally:
            unload_adapter(model)


def bytes_of(model: PeftModel, *, shared: bool) -> Record:
    """Values that train, bytes of a tenant's saved folder, and bytes of its tensors in memory.

    On a shared basis P and Q are not the tenant's.
    """
    layers = frozen_core_layers(model, "default")
    cores = [layer.factors("default") for layer in layers.values()]
    values = [R for _, _, R in cores] or [p for p in model.parameters() if p.requires_grad]
    held = values if shared or not cores else [tensor for factors in cores for tensor in factors]
    with TemporaryDirectory() as folder:
        if shared:
            save_basis(model, Path(folder) / "basis")
        place = Path(folder) / "tenant"
        model.save_pretrained(str(place))
        disk = sum(file.stat().st_size for file in place.iterdir() if file.suffix in (".safetensors", ".json"))
    return {
        "values": sum(value.numel() for value in values),
        "disk_bytes": disk,
        "memory_bytes": sum(tensor.nbytes for tensor in held),
    }


class Tenants:
    """The lines of the study of tenants by arm, rank and seed, of seeds that have every tenant."""

    def __init__(self) -> None:
        place = RESULTS / "tenants-quality"
        self.tenants = json.loads((place / "manifest.json").read_text(encoding="utf-8"))["tenants"]
        lines = lines_of(place.with_suffix(".jsonl"))
        self.base = {line["tenant"]: line for line in lines if line["phase"] == "base"}
        found: dict[tuple[str, int], dict[int, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
        for line in lines:
            if line["phase"] == "final":
                found[line["arm"], line["rank"]][line["seed"]][line["tenant"]] = line
        order = sorted(found, key=lambda arm: (list(LABELS).index(arm[0]), arm[1]))
        self.arms = {arm: {s: of for s, of in sorted(found[arm].items()) if len(of) == len(self.base)} for arm in order}

    def values(self, arm: tuple[str, int], measure: str, names: Iterable[str]) -> NDArray[np.float64]:
        """(tenants, seeds); accuracies in per cent."""
        times = 100.0 if measure == "accuracy" else 1.0
        return times * np.array([[of[name][measure] for of in self.arms[arm].values()] for name in names])

    def difference(
        self, arm: Arm, measure: str, names: Sequence[str], other: Arm = ("own", RANK)
    ) -> tuple[float, float, float]:
        """The mean difference from another arm, and its interval.

        Tenants of one data set are alike, so each draw takes data sets with replacement, then as many tenants of each
        as it has, and seeds for all of them.
        """
        found = self.values(arm, measure, names) - self.values(other, measure, names)
        draw, num_seeds = np.random.default_rng(0), found.shape[1]
        task_of = [self.tenants[name]["task"] for name in names]
        members = [[i for i, task in enumerate(task_of) if task == source] for source in dict.fromkeys(task_of)]
        seeds = draw.integers(num_seeds, size=(DRAWS, num_seeds))
        by_tenant = found[:, seeds].mean(axis=2).T  # (draws, tenants)
        sums, counts = np.zeros(DRAWS), np.zeros(DRAWS)
        for sources in draw.integers(len(members), size=(len(members), DRAWS)):
            for source, own in enumerate(members):
                taken = np.flatnonzero(sources == source)
                tenants = np.array(own)[draw.integers(len(own), size=(len(taken), len(own)))]
                sums[taken] += by_tenant[taken[:, None], tenants].sum(axis=1)
                counts[taken] += len(own)
        low, high = np.quantile(sums / counts, [0.025, 0.975])
        return float(found.mean()), float(low), float(high)

    def apart(self, arm: Arm, measure: str, names: Sequence[str]) -> str:
        """The difference from own bases of rank 16, for a table."""
        if arm == ("own", RANK):
            return ""
        middle, low, high = self.difference(arm, measure, names)
        digits = 1 if measure == "accuracy" else 3
        return f"{middle:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"

    def table(self) -> str:
        """Each arm over all tenants, then over those that took no part in calibration."""
        newcomers = [name for name, about in self.tenants.items() if not about["calibrated"]]
        before = [fmean(one[measure] for one in self.base.values()) for measure in ("accuracy", "loss")]
        rows = [["base model", "", f"{100 * before[0]:.1f}", "", f"{before[1]:.3f}", "", ""]]
        for who, names in (("", list(self.tenants)), (f"{len(newcomers)} newcomers: ", newcomers)):
            for arm, seeds in self.arms.items():
                some = next(iter(next(iter(seeds.values())).values()))
                accuracy, loss = (self.values(arm, measure, names).mean() for measure in ("accuracy", "loss"))
                cells = [f"{accuracy:.1f}", self.apart(arm, "accuracy", names)]
                cells += [f"{loss:.3f}", self.apart(arm, "loss", names), f"{some['disk_bytes']:,}"]
                rows.append([f"{who}{LABELS[arm[0]]}, r = {arm[1]}", str(len(seeds)), *cells])
        heads = ["each tenant has", "seeds", "accuracy, %", "minus own, r = 16", "loss", "minus own, r = 16"]
        return table([*heads, "bytes on disk"], rows)


def main() -> None:
    parser = parser_of(__doc__, "tenants-quality", "jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    if options.quick and options.out is None:
        parser.error("--quick needs --out FILE, because nothing of it belongs into the results.")
    options.out = options.out or RESULTS / f"{options.name}.jsonl"
    torch.set_num_threads(1)
    name, dtype = ("pocket", "float32") if options.quick else (options.model, "bfloat16")
    model, tokenizer = load_model(name, dtype=dtype, device="cpu")
    model.set_attn_implementation("eager")  # on a CPU faster for short rows
    if options.quick:
        scale, tenants = QUICK, make_tenants(QUICK_TENANTS, None, validation=8, held_out=8)
    else:
        scale, tenants = FULL, make_tenants(TENANTS, options.data_root)
    where = provenance()
    common = {
        "model": fingerprint_model(model),
        "dtype": dtype,
        "commit": where["commit"],
        "steps_version": where["steps_version"],
        "versions": {package: where["versions"][package] for package in ("torch", "transformers", "peft")},
        "rows": sha256(json.dumps(manifest_of(tenants)).encode()).hexdigest(),
        "recipe": {"rows_a_step": ROWS_A_STEP, "fewest_steps": FEWEST_STEPS, "warmup": WARMUP},
        "calibration": CALIBRATION,
    }
    results = Results(options.out, common, by=("arm", "rank", "seed", "tenant"))
    write_tenants(tenants, options.out.with_suffix(""))
    Study(model, PromptEncoder(tokenizer, style="plain"), tenants, results, scale).run()


if __name__ == "__main__":
    main()
