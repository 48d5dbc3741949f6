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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from json import dumps
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from frozencore import calibrate, frozen_core_layers, swap_core
from frozencore.calibration.collect import collect_moments
from frozencore.files.fingerprint import fingerprint_model
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.compress import Compression, compress
from frozencore.maths.moments import LayerMoments
from frozencore.tune.load import load_model
from frozencore.tune.many.tenant import Tenant as CoreTenant
from frozencore.tune.many.tenant import Trained
from frozencore.tune.many.train import train_many
from frozencore.tune.provenance import provenance
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import overhead_tokens_of
from harness import RESULTS, Record, Results, parser_of, table
from tenant_rows import TENANTS, make_tenants, manifest_of
from tenants_quality import CALIBRATION, FEWEST_STEPS, QUICK_TENANTS, ROWS_A_STEP, WARMUP, Scale, Study

SEED, RANK = 42, 16
RATES = {"own": 1e-2, "pooled": 2e-2, ("lora", 16): 2e-3, ("lora", 1): 1.6e-2}
"""The rates that were searched in tenants_quality.py."""
LEARNED_RATES = (2e-2, 1e-2, 4e-2)
"""Rates on a learned basis; the mean loss on the newcomers' validation rows chooses one."""
TRAINED_ON_RATE = 5e-3
Updates = dict[str, tuple[Tensor, Tensor]]
"""B and A of an update by layer."""
Bases = Mapping[str, Compression]


@dataclass
class CompressStudy:
    """The study of tenants, with a folder for what was trained."""

    study: Study
    work: Path
    results: Results
    ranks: Sequence[int]
    rank: int
    _pooled: dict[str, LayerMoments] = field(default_factory=dict)

    @property
    def everyone(self) -> list[str]:
        return list(self.study.tenants)

    @property
    def newcomers(self) -> list[str]:
        return [name for name in self.everyone if name not in self.study.calibrated]

    def run(self) -> None:
        """Measure everything that is missing, what decides most first."""
        sixteen, rank, half = self.study.calibrated, self.rank, self.everyone[1::2][:10]
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
        self.newcomers_on("pooled", None, rank, (RATES["pooled"],))
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

    def has(self, arm: str, rank: int, tenant: str, rate: float | None = None) -> bool:
        return self.results.has(phase="final", arm=arm, rank=rank, tenant=tenant, learning_rate=rate)

    def add(self, arm: str, rank: int, tenant: str, model: Any, **more: Any) -> None:
        named = {"phase": "final", "arm": arm, "rank": rank, "tenant": tenant, "learning_rate": None}
        self.results.add(**{**named, **self.study.score(model, tenant, "held-out"), **more})

    def base(self) -> None:
        for name in self.everyone:
            if not self.has("base", 0, name):
                self.add("base", 0, name, self.study.model)

    # ------------------------------------------------------------------------------------------- adapters of their own

    def trained(self, arm: str, rank: int, names: Sequence[str]) -> dict[str, Updates]:
        """The updates of these tenants, of which those that are not there are trained and scored."""
        found = {}
        for name in names:
            file = self.work / f"{arm}-{rank}" / f"{name}.safetensors"
            if not (file.exists() and self.has(arm, rank, name)):
                model = self.own(name, rank) if arm == "own" else self.lora(name, rank)
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file(factors_of(model), file)
                self.add(arm, rank, name, model)
                unload_adapter(model)
            stored = load_file(file)
            found[name] = {key[:-2]: (stored[key], stored[f"{key[:-2]}.A"]) for key in stored if key.endswith(".B")}
        return found

    def lora(self, name: str, rank: int) -> PeftModel:
        model = self.study.adapter("lora", rank, 1000 + self.everyone.index(name))
        recipe = self.study.recipe(name, RATES.get(("lora", rank), 2e-3), SEED)
        recipe = replace(recipe, overhead_tokens=overhead_tokens_of(self.study.model))
        train(model, self.study.train_rows[name], recipe, pad_id=self.study.encoder.pad_id)
        return model

    def own(self, name: str, rank: int) -> PeftModel:
        moments = self.moments(name)
        model = self.study.adapter("own", rank, SEED)
        calibrate(model, moments=moments, progress=False)
        self.train_cores(model, {name: RATES["own"]})
        return model

    def moments(self, name: str) -> dict[str, LayerMoments]:
        bare = self.study.adapter("random", 1, 0)
        names = list(frozen_core_layers(bare, "default"))
        unload_adapter(bare)
        layers = {layer: self.study.model.get_submodule(layer) for layer in names}
        return collect_moments(
            self.study.model, self.study.calibration_batches(name, SEED), layers, needs=CAPTURE_NEEDS
        )

    def train_cores(self, model: PeftModel, rates: Mapping[str, float]) -> dict[str, dict[str, Tensor]]:
        """Train tenants together; the model gets the core of the last one."""
        recipes = {name: self.study.recipe(name, rate, SEED) for name, rate in rates.items()}
        together = {name: CoreTenant(self.study.train_rows[name], recipe) for name, recipe in recipes.items()}
        done: dict[str, Trained] = {}
        train_many(model, together, done.update, pad_id=self.study.encoder.pad_id)
        cores = {name: done[name].cores for name in rates}
        swap_core(model, next(reversed(cores.values())))
        return cores

    # ------------------------------------------------------------------------------------------------ one basis of them

    def basis(self, updates: Mapping[str, Updates], rank: int) -> dict[str, Compression]:
        layers = next(iter(updates.values()))
        return {layer: compress([own[layer] for own in updates.values()], rank) for layer in layers}

    def model_on(self, P: Mapping[str, Tensor], Q: Mapping[str, Tensor], rank: int) -> PeftModel:
        bases = {f"{layer}.P": P[layer] for layer in P} | {f"{layer}.Q": Q[layer] for layer in Q}
        return self.study.adapter("random", rank, 0, bases)

    def on(self, basis: Bases, rank: int) -> PeftModel:
        return self.model_on({k: one.P for k, one in basis.items()}, {k: one.Q for k, one in basis.items()}, rank)

    def projected(self, own: Updates, basis: Bases, rank: int) -> tuple[dict[str, Tensor], float]:
        """The cores of an update on a basis, at the scale of an adapter, and the share of the update that they keep."""
        cores = {layer: (one.P.mT @ own[layer][0]) @ (own[layer][1] @ one.Q) for layer, one in basis.items()}
        whole = sum(float((B @ A).square().sum()) for B, A in own.values())
        kept = sum(float(R.square().sum()) for R in cores.values()) / whole
        return {layer: R * rank / 16 for layer, R in cores.items()}, kept

    def score_on(
        self,
        arm: str,
        sources: Mapping[str, Updates],
        names: Sequence[str],
        rank: int,
        of: Mapping[str, Updates] | None = None,
    ) -> None:
        """Score tenants' updates on the basis of the sources."""
        missing = [name for name in names if not self.has(arm, rank, name)]
        if not missing:
            return
        basis = self.basis(sources, rank)
        model = self.on(basis, rank)
        for name in missing:
            cores, kept = self.projected((of or sources)[name], basis, rank)
            swap_core(model, cores)
            self.add(arm, rank, name, model, kept=kept, sources=len(sources))
        unload_adapter(model)

    def score_mean(self, sources: Mapping[str, Updates], rank: int) -> None:
        missing = [name for name in sources if not self.has("lora, mean", rank, name)]
        if not missing:
            return
        basis = self.basis(sources, rank)
        model = self.on(basis, rank)
        every = [self.projected(own, basis, rank)[0] for own in sources.values()]
        swap_core(model, {layer: torch.stack([cores[layer] for cores in every]).mean(0) for layer in basis})
        for name in missing:
            self.add("lora, mean", rank, name, model, sources=len(sources))
        unload_adapter(model)

    def kept(self, sources: Mapping[str, Updates]) -> None:
        """The share that all and half of them keep at each rank."""
        for number in sorted({max(1, len(sources) // 2), len(sources)}):
            names = list(sources)[:: len(sources) // number][:number]
            for rank in self.ranks:
                named = {"phase": "kept", "arm": "lora", "rank": rank, "tenant": str(number)}
                if not self.results.has(**named):
                    some = {name: sources[name] for name in names}
                    basis = self.basis(some, rank)
                    shares = [self.projected(own, basis, rank)[1] for own in some.values()]
                    self.results.add(**named, kept=fmean(shares), least=min(shares))

    # -------------------------------------------------------------------------------------------------------- training

    def newcomers_on(self, arm: str, sources: Mapping[str, Updates] | None, rank: int, rates: Sequence[float]) -> None:
        """Train the newcomers from zero at each rate; their validation rows are scored too.

        Args:
            sources: The updates whose basis it is; None for the pooled basis.
        """
        for rate in rates:
            named = f"newcomers, {arm}"
            missing = [name for name in self.newcomers if not self.has(named, rank, name, rate)]
            if not missing:
                continue
            if sources is None:
                model = self.model_on(*self.pooled_basis(), rank)
            else:
                model = self.on(self.basis(sources, rank), rank)
            done = self.train_cores(model, dict.fromkeys(self.newcomers, rate))
            for name in missing:
                swap_core(model, done[name])
                validation = self.study.score(model, name, "validation")["loss"]
                self.add(named, rank, name, model, learning_rate=rate, validation_loss=validation)
            unload_adapter(model)

    def pooled_basis(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One FCCA of rows of the calibrated tenants, as in tenants_quality.py."""
        file = self.work / "pooled.safetensors"
        if not file.exists():
            pooled: dict[str, LayerMoments] = {}
            for name in self.study.calibrated:
                for layer, found in self.moments(name).items():
                    pooled[layer] = pooled[layer] + found if layer in pooled else found
            model = self.study.adapter("pooled", self.rank, SEED)
            calibrate(model, moments=pooled, progress=False)
            stored = {}
            for name, layer in frozen_core_layers(model, "default").items():
                P, Q, _ = layer.factors("default")
                stored |= {f"{name}.P": P.contiguous(), f"{name}.Q": Q.contiguous()}
            save_file(stored, file)
            unload_adapter(model)
        stored = load_file(file)
        return tuple({key[:-2]: X for key, X in stored.items() if key.endswith(side)} for side in (".P", ".Q"))  # type: ignore[return-value]

    def train_on(self, arm: str, sources: Mapping[str, Updates], rank: int) -> None:
        missing = [name for name in sources if not self.has(arm, rank, name)]
        if not missing:
            return
        basis = self.basis(sources, rank)
        model = self.on(basis, rank)
        for name in missing:
            swap_core(model, self.projected(sources[name], basis, rank)[0])
            recipe = replace(self.study.recipe(name, TRAINED_ON_RATE, SEED), epochs=1)
            tenant = CoreTenant(self.study.train_rows[name], recipe)
            done: dict[str, Trained] = {}
            train_many(model, {name: tenant}, done.update, pad_id=self.study.encoder.pad_id)
            swap_core(model, done[name].cores)
            self.add(arm, rank, name, model)
        unload_adapter(model)


def factors_of(model: PeftModel) -> dict[str, Tensor]:
    """B and A of each layer's update, scale included, under ``<layer>.B`` and ``<layer>.A``."""
    found: dict[str, Tensor] = {}
    for name, layer in frozen_core_layers(model, "default").items():
        P, Q, R = (X.detach().float() for X in layer.factors("default"))
        found |= {f"{name}.B": layer.frozencore_scale["default"] * P @ R, f"{name}.A": Q.mT.contiguous()}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            B, A = (X["default"].weight.detach().float() for X in (module.lora_B, module.lora_A))
            found |= {f"{name}.B": (module.scaling["default"] * B).contiguous(), f"{name}.A": A.clone()}
    return found


GROUPS: Mapping[str, Sequence[tuple[str, str, int]]] = {
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
"""Arms that are compared with the first of their group, on the tenants that all of them have."""
DRAWS = 10_000


def found_arms(lines: Sequence[Record]) -> dict[tuple[str, int], dict[str, Record]]:
    """Lines by arm, rank and tenant; where a rate was searched, those of the best rate on validation rows."""
    by_rate: dict[tuple[str, int], dict[float | None, dict[str, Record]]] = {}
    for line in lines:
        if line["phase"] == "final":
            rates = by_rate.setdefault((line["arm"], line["rank"]), {})
            rates.setdefault(line["learning_rate"], {})[line["tenant"]] = line
    arms = {}
    for arm, rates in by_rate.items():
        most = max(len(of) for of in rates.values())
        whole = [of for of in rates.values() if len(of) == most]
        arms[arm] = min(whole, key=lambda of: fmean(line.get("validation_loss", 0.0) for line in of.values()))
    return arms


def apart(arm: Mapping[str, Record], first: Mapping[str, Record], names: Sequence[str], measure: str) -> str:
    """The mean difference and its interval, which resamples tenants."""
    times, digits = (100, 1) if measure == "accuracy" else (1, 3)
    differences = times * np.array([arm[name][measure] - first[name][measure] for name in names])
    drawn = np.random.default_rng(0).integers(len(names), size=(DRAWS, len(names)))
    low, high = np.quantile(differences[drawn].mean(axis=1), [0.025, 0.975])
    return f"{differences.mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def table_of(lines: Sequence[Record]) -> str:
    """Every group of which at least two arms are there."""
    arms, rows = found_arms(lines), []
    for group, members in GROUPS.items():
        here = [(label, arms[arm, rank]) for label, arm, rank in members if (arm, rank) in arms]
        names = [name for name in here[0][1] if all(name in of for _, of in here)] if here else []
        if len(here) < 2 or len(names) < 2 or (members[0][1], members[0][2]) not in arms:
            continue
        first = here[0][1]
        for label, of in here:
            means = {measure: fmean(of[name][measure] for name in names) for measure in ("accuracy", "loss")}
            kept = [of[name]["kept"] for name in names if "kept" in of[name]]
            differences = ["" if of is first else apart(of, first, names, measure) for measure in means]
            shares = f"{fmean(kept):.0%} ({min(kept):.0%} to {max(kept):.0%})" if kept else ""
            cells = [f"{100 * means['accuracy']:.1f}", differences[0], f"{means['loss']:.3f}", differences[1]]
            rows.append([f"{group}: {label}" if of is first else label, str(len(names)), shares, *cells])
    return table(["each tenant has", "n", "share kept", "accuracy, %", "minus first", "loss", "minus first"], rows)


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


def main() -> None:
    parser = parser_of(__doc__, "compress-quality", "jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--work", type=Path, help="Folder for trained adapters; a folder beside --out with --quick.")
    options = parser.parse_args()
    if (options.out is None and options.quick) or (options.work is None and not options.quick):
        parser.error("Give --work FOLDER, or with --quick --out FILE.")
    options.out = options.out or RESULTS / f"{options.name}.jsonl"
    torch.set_num_threads(1)
    name, dtype = ("pocket", "float32") if options.quick else (options.model, "bfloat16")
    model, tokenizer = load_model(name, dtype=dtype, device="cpu")
    model.set_attn_implementation("eager")  # on a CPU faster for short rows
    if options.quick:
        tenants = make_tenants(QUICK_TENANTS, None, validation=8, held_out=8)
    else:
        tenants = make_tenants(TENANTS, options.data_root)
    where = provenance()
    common = {
        "seed": SEED,
        "model": fingerprint_model(model)[:16],
        "dtype": dtype,
        "commit": where["commit"][:12] if where["commit"] else None,
        "rows": sha256(dumps(manifest_of(tenants)).encode()).hexdigest()[:16],
        "recipe": f"{ROWS_A_STEP} rows a step, {FEWEST_STEPS} steps, warm-up {WARMUP}, calibration {CALIBRATION}",
    }
    results = Results(options.out, common, by=("arm", "rank", "tenant", "learning_rate"), varies=())
    study = Study(model, PromptEncoder(tokenizer, style="plain"), tenants, results, Scale(arms=()))
    work = options.work or options.out.with_suffix(".work")
    ranks, rank = ((2, 4, 8), 4) if options.quick else ((16, 32, 64), RANK)
    whole = CompressStudy(study, work, results, ranks, rank)
    whole.run()


if __name__ == "__main__":
    main()
