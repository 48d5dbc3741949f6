"""Fifty-seven data sets as tenants of one model: what a shared basis, its constructor, and few bits cost.

    OMP_NUM_THREADS=1 python benchmarks/datasets_quality.py --data-root DIR --work FOLDER            # resumes
    python benchmarks/datasets_quality.py --data-root DIR --work FOLDER --device cuda --dtype bfloat16
    python benchmarks/datasets_quality.py --data-root DIR --work FOLDER --arms fcca-16,lora-1 --first 20 --seeds 1

``--data-root`` holds ``development`` and ``final``, each with NAME.train.jsonl and NAME.eval.jsonl. A tenant is a data
set: 96 training rows, plain prompts, four epochs, eight rows a step. It is scored on all its evaluation rows: the loss
in nats per token of the completion, end token included, and the share of rows whose every token, that one included, is
the likeliest (the exact match of greedy generation). Shared bases are made of 16 rows of each development set, so the
final sets are newcomers to all of them.

Set on 28 November 2026, before the first run:

- Three primary differences, each the mean over all data sets of both measures: own basis minus shared FCCA, shared FCCA
  minus LoRA of rank 1, shared FCCA minus shared Random (cores of rank 16).
- An interval is 95 %, from resampling data sets. "Equal" means that it lies within 2 points and within .03 nats.
- Everything else is secondary, with Holm's adjustment.
- The learning rate of each arm is searched on rows 97 to 150 of some development sets, by factors of two until the
  best one lies between two worse ones. It holds for all data sets, seeds and bits.

Set on 29 November, still before the first run, for a machine of two cores without bfloat16:

- The searches take four development sets (they were eight): on eight a search would cost half of an arm.
- ``--first N`` measures the N data sets with the shortest training rows, so that each arm has the same ones.
- Before the runs of ranks 8 and 32: cores of these train at the rate that rank 16 found.

Set on 29 November, after 24 data sets and before the runs of this arm: own bases were made of only 16 rows each, at one
rate for all. The arm ``tuned`` is what ``frozencore tune`` gives: FCCA of all 96 training rows, and a core at the rate
that the calibration measures for each data set, without a search. ``measured`` is a core on the shared FCCA basis at
the rate that is measured on it for each data set. Its runs were set when the first 13 of ``tuned`` had been seen to be
better than the shared basis at one rate.

Set on 30 November, after 36 data sets: the difference of ``tuned`` from the shared basis is also shown apart for
newcomers, whose rows made no shared basis, and for the other data sets.

Set on 30 November, after all other cuts of twelve LoRAs: each cut alone at 4 bits too, as cores have them.

Set on 30 November, before the first run with Qwen2.5-Coder-0.5B (``--model``, ``datasets-half.jsonl``): ``tuned`` minus
``measured`` on the eight data sets with the shortest rows. A search of rates would cost hours there; these need none.
When five of its lines had been seen, which took a third of the time that was expected: ``measured`` minus a LoRA of
rank 1 on these eight too, whose rate is searched as above; then the same arms on eight more.

Set on 30 November, after ``tuned`` had been seen to answer more than LoRAs of rank 16 on 24 data sets, before the first
run of this arm: ``tuned`` has a rate of its own on each data set, and those LoRAs had one for all. The arm ``chosen``
is a LoRA at the best of three rates for each data set by the loss on rows 97 to 150: the searched one, half and twice.
When ten of its lines had been seen, 5 points above one rate for all: ``chosen_fcca``, the same of the shared FCCA.
Later the same of LoRAs of rank 1: its differences were set when two of its lines had been seen.

Set on 30 November, before their first runs: two other shared bases. ``compressed`` is that of the LoRAs of rank 16 of
the development sets among the 24 with the shortest rows, as ``frozencore compress`` chooses it. ``joint`` is FCCA of
every data set's own whitened gradient, each at norm 1, where FCCA takes the gradient of all rows: gradients of unlike
data sets cancel in a sum.

Set on 30 November for Qwen2.5-Coder-0.5B, where a shared core is 5 points below a LoRA of rank 1: ``measured`` at rank
32, and ``halved``, at half of the measured rates. The latter was set when four lines of the former had been seen, at
higher rates on the shared basis than on own ones.

Set on 1 December for Qwen2.5-Coder-1.5B in bfloat16, when five of its measured cores had been seen: ``measured`` minus
a LoRA of rank 1 at .004, which was found at 0.5B, and at .002; minus shared Random at .03, half of the rate measured
for it there, and at .015; six data sets (``datasets-coder.jsonl``).

Set on 1 December, before their first runs: ``--all-linear``, adapters on all linear layers, for the shared FCCA of rank
16 and for a LoRA of rank 1. The question is whether more layers close the gap of a shared core to a LoRA of rank 1 on
the attention layers, which has twice the values of such a core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from peft import PeftModel
from torch import Tensor

from diagonal import diagonal
from frozencore import Core, basis_id, calibrate, swap_core
from frozencore.adapter.basis import Basis
from frozencore.files.fingerprint import fingerprint_model
from frozencore.maths.basis import known_basis
from frozencore.maths.compress import compress, core_of
from frozencore.maths.linalg import thin_qr, truncated_svd
from frozencore.maths.moments import LayerMoments
from frozencore.maths.quantise import levels, quantise
from frozencore.maths.whitening import Whitening
from frozencore.progress import no_progress
from frozencore.tune.adapt import rate_for
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, calibration_batches
from frozencore.tune.training.recipe import Recipe
from harness import ROOT, Record, parser_of, study_file
from tenant_rows import Tenant, TenantPlan, manifest_of
from tenant_study import (
    ALL_LINEAR,
    RANK,
    SEED,
    Adapters,
    Job,
    Results,
    Study,
    Updates,
    key,
    put_factors,
    rows_of,
    study_model,
)
from tenants_quality import mean_of

TRAIN, VALIDATION, EPOCHS, CALIBRATION = 96, 54, 4, 16
NEWCOMERS = {
    "agnews", "banking77", "bbh_disambiguation_qa", "bbh_hyperbaton", "bbh_multistep_arithmetic_two",
    "bbh_reasoning_about_colored_objects", "bbh_tracking_shuffled_objects_three_objects", "clinc_domain",
    "commitmentbank", "dstc8_buses_slot", "idiom_or_literal", "med_monotonicity", "noun_verb", "pubmed_section",
    "restaurant8k_slot", "sst2", "trec_coarse", "tweet_irony", "unimorph_english",
}  # fmt: skip
"""The final data sets, whose rows make no shared basis."""
SEARCHED = ("snips_intent", "clickbait", "tweet_emotion", "numersense")
FIRST_RATES = {
    "own": 1e-2, "fcca": 1e-2, "rawgrad": 1e-2, "eva": 1e-2, "random": 2e-2, "lora_xs": 1e-2, "lora": 2e-3,
    "compressed": 1e-2, "joint": 1e-2,
}  # fmt: skip
"""Where a search begins: this rate, twice it and half of it."""
ARMS: Sequence[tuple[str, int]] = [
    ("base", 0), ("fcca", 16), ("lora", 1), ("random", 16), ("own", 16), ("lora", 16), ("fcca", 8), ("fcca", 32),
    ("rawgrad", 16), ("eva", 16), ("lora_xs", 16), ("tuned", 16), ("measured", 16), ("chosen", 16),
    ("chosen", 1), ("chosen_fcca", 16), ("compressed", 16), ("joint", 16), ("halved", 16),
]  # fmt: skip
"""The arms with their ranks, what counts most first: ``own`` and ``tuned`` are FCCA of a tenant's own rows."""
BY_SET = {
    "tuned": "measured", "measured": "measured", "halved": "half the measured", "chosen": "chosen",
    "chosen_fcca": "chosen",
}  # fmt: skip
"""Arms with a rate for each data set, and how it is found."""
SHARES = {"measured": 1.0, "halved": 0.5}
"""Arms at the measured rate or at a share of it."""
CHOSEN = {"chosen": "lora", "chosen_fcca": "fcca"}
"""Arms at the best of three rates, and how their adapters are trained."""
LOWER = ("own, at 0.02", 16)
"""Own bases at the rate of the shared one, half of the one found for them."""
COMPRESSED = 24
"""A basis of compressed LoRAs is made of the development sets among so many with the shortest rows."""
GRADIENT_RANK = 32
"""The directions of a data set's own whitened gradient that enter the basis of every one's."""
BITS = (8, 4, 3, 2, 1)


def is_newcomer(name: str) -> bool:
    return name in NEWCOMERS


def is_calibrated(name: str) -> bool:
    return name not in NEWCOMERS


ROWS_AT_ONCE = 16
LORA = 16
CUTS = {
    "full cores, 4 bits": (32,),
    "full cores": (16, 32, 64),
    "diagonal cores": (16, 64, 256),
    "cut alone": (1, 2, 4),
    "cut alone, 4 bits": (1, 2),
}
QUICK_CUTS = {
    "full cores, 4 bits": (2,), "full cores": (2,), "diagonal cores": (3,), "cut alone": (1,),
    "cut alone, 4 bits": (1,),
}  # fmt: skip
GROUP = 4
"""How many data sets train together in an arm before the next arm has them."""
QUICK_ARMS: Sequence[tuple[str, int]] = [
    ("base", 0), ("fcca", 4), ("lora", 2), ("own", 4), ("eva", 4), ("tuned", 4), ("measured", 4),
    ("chosen", 2), ("chosen_fcca", 4), ("compressed", 4), ("joint", 4), ("halved", 4),
]  # fmt: skip
SCORED = "rows 97 to 150 choose rates, the eval files score"


def tenants_of(root: Path) -> dict[str, Tenant]:
    """Every data set of both folders."""
    found = {}
    for file in sorted(root.glob("*/*.train.jsonl")):
        name = file.name.removesuffix(".train.jsonl")
        rows = {"train": rows_of(file), "held-out": rows_of(file.with_name(f"{name}.eval.jsonl"))}
        rows |= {"validation": rows["train"][TRAIN : TRAIN + VALIDATION], "train": rows["train"][:TRAIN]}
        plan = TenantPlan(name, TRAIN, name, calibrated=is_calibrated(name))
        found[name] = Tenant(plan, rows)
    return found


def quick_tenants() -> dict[str, Tenant]:
    """Three data sets of the example's rows."""
    rows = rows_of(ROOT / "examples" / "reviews.jsonl")
    parts = [
        {"train": rows[i::3][:16], "validation": rows[i::3][16:20], "held-out": rows[i::3][20:24]} for i in range(3)
    ]
    plans = [TenantPlan(f"part-{i}", 16, f"part {i}", calibrated=i < 2) for i in range(3)]
    return {plan.task: Tenant(plan, part) for plan, part in zip(plans, parts, strict=True)}


class Datasets(Study):
    """The study: every arm is searched, trained and scored, then scored again at fewer bits."""

    calibration: ClassVar[int] = CALIBRATION

    @property
    def searched(self) -> list[str]:
        return self.calibrated if self.quick else [*SEARCHED]

    @property
    def lora_rank(self) -> int:
        """The rank of the LoRAs that are compressed."""
        return 2 if self.quick else LORA

    @property
    def seeds(self) -> tuple[int, ...]:
        return (SEED,) if self.quick else (SEED, SEED + 1)

    def recipe(self, rows: Sequence[TokenRow], rate: float, seed: int = SEED) -> Recipe:
        return Recipe(rate, 0.1, epochs=1 if self.quick else EPOCHS, batch_size=8, accumulation=1, seed=seed)

    def run(
        self,
        arms: Sequence[tuple[str, int]],
        everyone: Sequence[str],
        seeds: int | None,
        only_train: bool,
        given: float | None = None,
    ) -> None:
        """Measure some arms on some data sets with the first seeds, None for all; then what is left of them.

        Bases are made of all development sets in any case.

        Args:
            only_train: Leave out fewer bits and compression.
            given: A learning rate in place of the searched one, which is part of the arms' names; their adapters are
                neither rounded nor compressed, nor are those on all linear layers.
        """
        groups = [everyone[start : start + GROUP] for start in range(0, len(everyone), GROUP)]
        for seed in self.seeds[:seeds]:
            rates = {(arm, rank): given or self.rate(arm, rank) for arm, rank in arms}
            for group in groups:
                for (arm, rank), rate in rates.items():
                    named = self.named(arm) + (f", at {given:g}" if given else "")
                    jobs = [(name, rate) for name in group]
                    self.measure(named, rank, jobs, self.adapters(arm, rank, seed), seed=seed)
            if only_train or given or self.on_all_linear:
                continue
            for arm, rank in arms:
                for bits in BITS if arm in ("fcca", "lora") else ():
                    jobs = [(name, rates[arm, rank]) for name in everyone]
                    at_bits = partial(self.rounded, arm, rank, seed, bits)
                    self.measure(f"{arm}, {bits} bits", rank, jobs, at_bits, seed=seed)
            if (rate := rates.get(("lora", self.lora_rank))) is not None:
                self.compressed_loras(everyone, rate, seed)

    @property
    def on_all_linear(self) -> bool:
        return self.targets == "all-linear"

    def named(self, arm: str) -> str:
        return arm + ALL_LINEAR * self.on_all_linear

    def shortest(self, count: int | None) -> list[str]:
        """So many data sets, None for all, those with the shortest training rows first."""
        return sorted(self.everyone, key=lambda name: sum(len(row.input_ids) for row in self.train_rows[name]))[:count]

    def rate(self, arm: str, rank: int) -> float | None:
        if arm in ("base", *BY_SET):
            return None
        searched = rank if self.quick or arm == "lora" else RANK
        return self.searched_rate(FIRST_RATES[arm], self.named(arm), searched, self.adapters(arm, searched, SEED))

    def compressed_loras(self, names: Sequence[str], rate: float, seed: int) -> None:
        """The LoRAs of rank 16 as full or diagonal cores on one basis of all of them, and each cut alone."""
        rank, every = self.lora_rank, QUICK_CUTS if self.quick else CUTS
        jobs: list[Job] = [(name, rate) for name in names]
        self.trained("lora", rank, jobs, seed)
        loras = {job[0]: self.update_of(self.file_of("lora", rank, seed, job)) for job in jobs}
        for arm, ranks in every.items():
            for other in (one for one in ranks if one <= rank * len(names)):  # so many directions they have in all
                self.measure(
                    f"lora of {len(names)}, {arm}", other, jobs, partial(self.cut, arm, other, loras), seed=seed
                )

    def update_of(self, name: str) -> Updates:
        stored = self.stored(name, dict)
        return {at[:-2]: (stored[at].mT, stored[f"{at[:-2]}.A"]) for at in stored if at.endswith(".B")}

    def cut(self, arm: str, rank: int, loras: Mapping[str, Updates], jobs: Sequence[Job]) -> Adapters:
        """Put each LoRA on the model as it is after it was cut, as a LoRA of the rank that this has; and its bytes."""
        layers = {layer: [own[layer] for own in loras.values()] for layer in next(iter(loras.values()))}
        done = {layer: CUTTERS[arm](updates, rank) for layer, updates in layers.items()}
        whole, kept, names = dict.fromkeys(loras, 0.0), dict.fromkeys(loras, 0.0), list(loras)
        found: dict[str, Updates] = {name: {} for name in names}
        for layer, (factors, _, _) in done.items():
            for name, (B, A), (left, right) in zip(names, layers[layer], factors, strict=True):
                whole[name] += float((B @ A).square().sum())
                kept[name] += float((B @ A).square().sum() - (B @ A - left @ right).square().sum())
                found[name][layer] = left, right
        sizes = {
            "value_bytes": sum(own for _, own, _ in done.values()),
            "basis_bytes": 4 * sum(shared for _, _, shared in done.values()),
        }
        with self.adapted("lora", max(left.shape[1] for left, _ in found[names[0]].values())) as model:
            for name, rate in jobs:
                put_factors(model, found[name])
                yield model, (name, rate), {**sizes, "sources": len(names), "kept": kept[name] / whole[name]}

    def adapters(self, arm: str, rank: int, seed: int) -> Callable[[Sequence[Job]], Adapters]:
        if arm == "base":
            return lambda jobs: ((self.model, job, {}) for job in jobs)
        if arm == "tuned":
            return partial(self.tuned, rank, seed)
        if arm in SHARES:
            return partial(self.measured, rank, seed, SHARES[arm])
        if arm in CHOSEN:
            return partial(self.chosen, CHOSEN[arm], rank, seed)
        train = {
            "lora": partial(self.loras, rank=rank, seed=seed), "own": partial(self.on_own_bases, rank=rank, seed=seed),
        }.get(arm) or (lambda jobs: self.on(self.basis(arm, rank, seed), rank, jobs, seed))  # fmt: skip
        return lambda jobs: self.kept(arm, rank, seed, train(jobs))

    def basis(self, constructor: str, rank: int, seed: int = SEED) -> dict[str, Tensor]:
        made = {"compressed": self.of_compressed_loras, "joint": self.of_every_gradient}.get(constructor)
        if made is None:
            return super().basis(constructor, rank, seed)
        return self.stored(f"{constructor}-{rank}-{seed}", partial(made, rank, seed))

    def of_compressed_loras(self, rank: int, seed: int) -> dict[str, Tensor]:
        """P and Q of LoRAs of development sets, as ``frozencore compress`` chooses them."""
        rate = self.rate("lora", self.lora_rank)
        jobs: list[Job] = [(name, rate) for name in self.shortest(COMPRESSED) if name in self.calibrated]
        self.trained("lora", self.lora_rank, jobs, seed)
        loras = [self.update_of(self.file_of("lora", self.lora_rank, seed, job)) for job in jobs]
        return Basis({at: compress([own[at] for own in loras], rank) for at in loras[0]}, options={}).tensors

    def of_every_gradient(self, rank: int, seed: int) -> dict[str, Tensor]:
        """P and Q as FCCA's, but of each data set's whitened gradient at norm 1, where FCCA takes that of their sum."""
        gradients: dict[str, list[Tensor]] = {}
        pooled: dict[str, LayerMoments] = {}
        for name in self.calibrated:
            for at, found in self.moments(name, seed).items():
                gradients.setdefault(at, []).append(found.G)
                pooled[at] = pooled[at] + found if at in pooled else found
        bases = {}
        for at, each in gradients.items():
            A_root, D_root = Whitening().inverse_roots(pooled[at])
            whitened = (A_root(D_root(G).mT).mT for G in each)
            cut = (truncated_svd(T, min(GRADIENT_RANK, *T.shape)) for T in whitened)
            joint = compress([(U * S, V.mT) for U, S, V in cut], rank)
            bases[at] = known_basis(thin_qr(D_root(joint.P.double()))[0], thin_qr(A_root(joint.Q.double()))[0])
        return Basis(bases, options={}).tensors

    def tuned(self, rank: int, seed: int, jobs: Sequence[Job]) -> Adapters:
        """Cores on FCCA of all training rows of each tenant, at the measured rate."""
        for name, _ in jobs:
            batches = calibration_batches(self.train_rows[name], self.encoder.pad_id)
            with self.adapted("fcca", rank, seed) as model:
                rate = calibrate(model, batches, progress=False).learning_rate
                for trained, _, about in self.cores(model, [(name, rate)], seed, shared=False):
                    yield trained, (name, None), {**about, "rate": rate}

    def measured(self, rank: int, seed: int, share: float, jobs: Sequence[Job]) -> Adapters:
        """Cores on the shared FCCA basis, each at a share of its measured rate."""
        with self.adapted("random", rank, 0, self.basis("fcca", rank, seed)) as model:
            rates = {name: rate_for(model, self.encoder.pad_id, self.train_rows[name], no_progress) for name, _ in jobs}
            given = [(name, None if rate is None else share * rate) for name, rate in rates.items()]
            for trained, (name, rate), about in self.cores(model, given, seed):
                yield trained, (name, None), {**about, "rate": rate}

    def chosen(self, arm: str, rank: int, seed: int, jobs: Sequence[Job]) -> Adapters:
        """Adapters, each at the best of three rates for its validation rows: the searched one, half and twice it."""
        rate = self.rate(arm, rank)
        assert rate is not None
        for name, _ in jobs:
            tries: list[Job] = [(name, factor * rate) for factor in (0.5, 1.0, 2.0)]
            self.trained(arm, rank, tries, seed)
            with self.empty(arm, rank, seed) as model:
                losses: dict[Job, float] = {}
                for job in tries:
                    self.put(model, arm, rank, self.stored(self.file_of(arm, rank, seed, job), dict))
                    losses[job] = self.score(model, name, "validation")["loss"]
                best = min(tries, key=losses.__getitem__)
                self.put(model, arm, rank, self.stored(self.file_of(arm, rank, seed, best), dict))
                yield model, (name, None), {"rate": best[1], "validation_losses": [*losses.values()]}

    def empty(self, arm: str, rank: int, seed: int) -> AbstractContextManager[PeftModel]:
        """The model with an adapter of an arm, for :meth:`put`."""
        return self.adapted(*(("lora", rank) if arm == "lora" else ("random", rank, 0, self.basis(arm, rank, seed))))

    def put(self, model: PeftModel, arm: str, rank: int, values: Mapping[str, Tensor]) -> None:
        """Make the values of :func:`values_of` those of an adapter."""
        if arm == "lora":
            layers = {name[:-2] for name in values}
            put_factors(model, {at: (values[f"{at}.B"].mT, values[f"{at}.A"]) for at in layers})
        else:
            swap_core(model, Core.of(basis_id(model), {at: R[0].view(rank, rank) for at, R in values.items()}))

    def kept(self, arm: str, rank: int, seed: int, trained: Adapters) -> Adapters:
        """The adapters, whose values are stored for :meth:`rounded`."""
        for model, (name, rate), about in trained:
            self.stored(self.file_of(arm, rank, seed, (name, rate)), lambda model=model: values_of(model))
            yield model, (name, rate), about

    def trained(self, arm: str, rank: int, jobs: Sequence[Job], seed: int = SEED) -> None:
        """Train the adapters that the work folder lacks, as when another machine has measured them."""
        missing = [
            job for job in jobs if not (self.work / f"{self.file_of(arm, rank, seed, job)}.safetensors").exists()
        ]
        for _ in self.adapters(arm, rank, seed)(missing) if missing else ():
            pass

    def file_of(self, arm: str, rank: int, seed: int, job: Job) -> str:
        """The name under which an adapter's values are stored."""
        return f"{arm}-{rank}-{seed}/{job[0]}-{job[1]:g}"

    def rounded(self, arm: str, rank: int, seed: int, bits: int, jobs: Sequence[Job]) -> Adapters:
        """Stored adapters at fewer bits: one scale a layer of a core, one a row of B's transpose and of A."""
        self.trained(arm, rank, jobs, seed)
        stored = {job: self.stored(self.file_of(arm, rank, seed, job), dict) for job in jobs}
        with self.empty(arm, rank, seed) as model:
            for job, values in stored.items():
                self.put(model, arm, rank, {name: rounded(value, bits) for name, value in values.items()})
                scales = sum(len(value) for value in values.values())
                yield model, job, {"value_bytes": bytes_at(bits, sum(v.numel() for v in values.values()), scales)}

    def score(self, model: Any, name: str, part: str) -> Record:
        """Loss in nats per token of the completions, and the share of rows whose tokens are all the likeliest, in %."""
        rows = sorted(self.tokens(self.tenants[name].rows[part]), key=lambda row: len(row.input_ids))
        collate, device = PaddingCollator(self.encoder.pad_id), next(model.parameters()).device
        nats, tokens, exact = 0.0, 0, 0
        model.eval()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            batch = {at: one.to(device) for at, one in collate(rows[start : start + ROWS_AT_ONCE]).items()}
            labels = batch.pop("labels")[:, 1:]
            first = int((labels != -100).nonzero()[:, 1].min())  # logits before the first completion are not needed
            wanted = torch.arange(first, labels.shape[1], device=device)  # a number of logits is slow on CPUs
            with torch.no_grad():
                logits = model(**batch, logits_to_keep=wanted).logits.float()
            labels = labels[:, first:]
            counts = labels != -100
            nats += float(torch.nn.functional.cross_entropy(logits[counts], labels[counts], reduction="sum"))
            tokens += int(counts.sum())
            exact += int(((logits.argmax(-1) == labels) | ~counts).all(1).sum())
        return {"loss": nats / tokens, "exact": 100 * exact / len(rows), "rows": len(rows)}


def values_of(model: PeftModel) -> dict[str, Tensor]:
    """The trained values of an adapter, as rows that share a scale: each layer's R, or the rows of Bᵀ and A."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            B, A = (side["default"].weight.detach().float().cpu() for side in (module.lora_B, module.lora_A))
            found |= {f"{name}.B": (module.scaling["default"] * B).mT.contiguous(), f"{name}.A": A.clone()}
        elif hasattr(module, "frozencore_scale"):
            found[name] = module.core("default").detach().float().cpu().reshape(1, -1).clone()
    return found


def rounded(rows: Tensor, bits: int) -> Tensor:
    """Each row at so many bits and back."""
    codes, scale = quantise(rows, bits)
    return levels(codes, scale.unsqueeze(-1), bits)


def bytes_at(bits: int, values: int, scales: int) -> int:
    """The bytes of so many values with their scales, two bytes each."""
    return values * bits // 8 + (2 * scales if bits < 32 else 0)


# -------------------------------------------------------------------------------------------------------------- cutting

Factors = tuple[list[tuple[Tensor, Tensor]], int, int]
"""Left and right factors of each update, the bytes of a tenant's own values, and how many values all share."""


def on_full_cores(updates: Sequence[tuple[Tensor, Tensor]], rank: int, bits: int = 32) -> Factors:
    basis = compress(updates, rank)
    cores = [core_of(basis.P, basis.Q, one) for one in updates]
    if bits < 32:
        cores = [rounded(R.reshape(1, -1), bits).view_as(R) for R in cores]
    factors = [(basis.P @ R, basis.Q.mT.contiguous()) for R in cores]
    return factors, bytes_at(bits, cores[0].numel(), 1), basis.P.numel() + basis.Q.numel()


def on_diagonal_cores(updates: Sequence[tuple[Tensor, Tensor]], rank: int) -> Factors:
    U, V, sigmas = diagonal(updates, rank)
    return [(U * sigma, V.mT.contiguous()) for sigma in sigmas], 4 * rank, U.numel() + V.numel()


def alone(updates: Sequence[tuple[Tensor, Tensor]], rank: int, bits: int = 32) -> Factors:
    factors = [mean_of([update], rank) for update in updates]
    if bits < 32:  # each column of the left factor and each row of the right one has a scale, as in a LoRA of few bits
        factors = [(rounded(left.mT, bits).mT, rounded(right, bits)) for left, right in factors]
    return factors, bytes_at(bits, sum(one.numel() for one in factors[0]), 2 * rank), 0


CUTTERS = {
    "full cores": on_full_cores,
    "full cores, 4 bits": partial(on_full_cores, bits=4),
    "diagonal cores": on_diagonal_cores,
    "cut alone": alone,
    "cut alone, 4 bits": partial(alone, bits=4),
}


def arms_of(text: str) -> list[tuple[str, int]]:
    return [(arm, int(rank)) for arm, _, rank in (one.rpartition("-") for one in text.split(","))]


def study_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options of the studies of these data sets."""
    parser = parser_of(doc, name, "jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--work", type=Path, help="Folder for trained adapters and bases; with --quick beside --out.")
    parser.add_argument("--first", type=int, help="Only so many data sets, those with the shortest rows.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser


Kind = TypeVar("Kind", bound=Study)


def study_of(options: argparse.Namespace, kind: type[Kind]) -> Kind:
    """The study with its model and its data sets, whose lines go to the file of the options."""
    out = study_file(options)
    model, encoder, here = study_model(options, options.dtype, options.device)
    tenants = quick_tenants() if options.quick else tenants_of(options.data_root)
    common = {
        "model": fingerprint_model(model)[:16], "dtype": options.dtype,
        "rows_sha256": sha256(json.dumps(manifest_of(tenants)).encode()).hexdigest()[:16],
        **here,
        "recipe": f"{TRAIN} rows, {EPOCHS} epochs, calibration {CALIBRATION}; {SCORED}",
    }  # fmt: skip
    results = Results(out, common, (*key("", 0, ""),))
    return kind(model, encoder, tenants, results, options.work or out.with_suffix(".work"), options.quick)


def main() -> None:
    parser = study_parser(__doc__, "datasets-quality")
    parser.add_argument("--arms", type=arms_of, help="Some arms with their ranks, as fcca-16,lora-1. Default: all.")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="Only these data sets, in place of --first.")
    parser.add_argument("--rate", type=float, help="A learning rate in place of the searched one, in lines apart.")
    parser.add_argument("--seeds", type=int, help="Only so many seeds.")
    parser.add_argument("--only-train", action="store_true", help="Leave out fewer bits and compression.")
    parser.add_argument("--all-linear", action="store_true", help="Adapters on all linear layers, in lines apart.")
    options = parser.parse_args()
    study = study_of(options, Datasets)
    if options.all_linear:
        study = replace(study, targets="all-linear", work=study.work / "all-linear")
    arms = options.arms or (QUICK_ARMS if options.quick else ARMS)
    everyone = options.sets or study.shortest(options.first)
    study.run(arms, everyone, options.seeds, options.only_train, options.rate)


if __name__ == "__main__":
    main()
