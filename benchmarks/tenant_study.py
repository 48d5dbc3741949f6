"""What the studies of tenants share: the model and its tenants, training and scoring, lines of results, intervals.

The tenants are those of tenant_rows.py, and all train by one recipe. A line of the results is one tenant in one arm, at
one rank, seed and learning rate: loss in nats per answer token without the end token, and accuracy. Lines that are
there are not measured again. Prompts are plain, and attention is ``eager``, which on a CPU trains short rows faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from json import dumps
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from contestants import ATTENTION
from frozencore import calibrate, frozen_core_layers, save_basis
from frozencore.adapter.bases import get_bases
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
from harness import RESULTS, Record, Results, best_rate, parser_of, table
from tenant_rows import SEARCHED, TENANTS, Tenant, TenantPlan, make_tenants, manifest_of

TODAY = "sharing-quality"
"""The results of arms and starts on rows that the code draws today; those of three seeds are of earlier rows."""
SEED, RANK = 42, 16
ROWS_A_STEP, FEWEST_STEPS, WARMUP = 8, 16, 0.1
CALIBRATION = 64  # rows of each tenant
POOLED_RATE, LORA_RATE = 2e-2, 2e-3
"""The rates at rank 16 that were searched in tenants_quality.py."""
MOST_RATES = 6
DRAWS = 10_000  # of the bootstrap
QUICK_TENANTS = {
    f"{kind}-{letter}": TenantPlan(f"pocket-{kind}", 24, "made up", calibrated=letter == "a")
    for kind in ("sentiment", "entailment")
    for letter in "ab"
}

Job = tuple[str, float]
"""A tenant and its learning rate."""
Cores = Mapping[str, Tensor]
Updates = dict[str, tuple[Tensor, Tensor]]
"""B and A of an update by layer."""


Opened = TypeVar("Opened", bound="Study")


@dataclass
class Study:
    """A model, its tenants as text and as tokens, what has been measured, and a folder for what was trained."""

    model: PreTrainedModel
    encoder: PromptEncoder
    tenants: Mapping[str, Tenant]
    results: Results
    work: Path
    quick: bool

    @property
    def rank(self) -> int:
        return 4 if self.quick else RANK

    # --------------------------------------------------------------------------------------------------------- tenants

    @property
    def everyone(self) -> list[str]:
        return list(self.tenants)

    @property
    def calibrated(self) -> list[str]:
        return [name for name, tenant in self.tenants.items() if tenant.plan.calibrated]

    @property
    def newcomers(self) -> list[str]:
        return [name for name, tenant in self.tenants.items() if not tenant.plan.calibrated]

    @property
    def searched(self) -> list[str]:
        """The tenants whose validation rows choose the learning rates."""
        return ["sentiment-a"] if self.quick else [*SEARCHED]

    @cached_property
    def train_rows(self) -> dict[str, list[TokenRow]]:
        return {name: self.tokens(tenant.rows["train"]) for name, tenant in self.tenants.items()}

    def tokens(self, examples: Sequence[Example]) -> list[TokenRow]:
        return self.encoder.training_rows(examples)

    def recipe(self, rows: Sequence[TokenRow], rate: float, seed: int = SEED) -> Recipe:
        """As many epochs as make sixteen steps."""
        epochs = math.ceil(FEWEST_STEPS / math.ceil(len(rows) / ROWS_A_STEP))
        return Recipe(rate, WARMUP, epochs=epochs, batch_size=ROWS_A_STEP, accumulation=1, seed=seed)

    # --------------------------------------------------------------------------------------------------------- results

    def has(
        self, arm: str, rank: int, tenant: str, rate: float | None = None, *, seed: int = SEED, phase: str = "final"
    ) -> bool:
        return self.results.has(phase=phase, arm=arm, rank=rank, seed=seed, tenant=tenant, learning_rate=rate)

    def add(
        self,
        arm: str,
        rank: int,
        tenant: str,
        rate: float | None = None,
        *,
        seed: int = SEED,
        phase: str = "final",
        **found: Any,
    ) -> None:
        named = {"phase": phase, "arm": arm, "rank": rank, "seed": seed, "tenant": tenant, "learning_rate": rate}
        self.results.add(**named, **found)

    def score(self, model: Any, name: str, part: str) -> Record:
        """Loss in nats per token of the right answers, and the share of rows whose right answer is the likeliest."""
        examples = self.tenants[name].rows[part]
        predictions = predict_choices(model, self.encoder, examples)
        tokens = self.encoder.choice_rows(examples)
        gold = [example.choices.index(example.completion) for example in examples]
        nats = -sum(one.logprobs[place] for one, place in zip(predictions, gold, strict=True))
        count = sum(len(row.choice_ids[place]) for row, place in zip(tokens, gold, strict=True))
        return {"loss": nats / count, "accuracy": fmean(one.correct for one in predictions)}

    def add_score(self, model: Any, arm: str, rank: int, tenant: str, rate: float | None = None, **more: Any) -> None:
        """A final line with the scores of held-out rows."""
        self.add(arm, rank, tenant, rate, **self.score(model, tenant, "held-out"), **more)

    def base(self) -> None:
        """The lines of the base model."""
        for name in self.everyone:
            if not self.has("base", 0, name):
                self.add_score(self.model, "base", 0, name)

    def searched_rate(self, first: float, measure: Callable[[list[Job]], None], arm: str, rank: int) -> float:
        """The learning rate with the lowest mean loss on validation rows of some tenants, by factors of two.

        Args:
            measure: Adds a line of the phase ``search`` for each job.
        """

        def losses_of(rates: list[float]) -> dict[float, float]:
            jobs = [(name, rate) for rate in rates for name in self.searched]
            missing = [job for job in jobs if not self.has(arm, rank, *job, phase="search")]
            if missing:
                measure(missing)
            key = {"phase": "search", "arm": arm, "rank": rank, "seed": SEED}
            found = {job: self.results.get(**key, tenant=job[0], learning_rate=job[1])["loss"] for job in jobs}
            return {rate: fmean(found[name, rate] for name in self.searched) for rate in rates}

        return best_rate(first, losses_of, MOST_RATES)[0]

    # ----------------------------------------------------------------------------------------------- adapters and bases

    def adapter(self, method: str, rank: int, seed: int = SEED, bases: Mapping[str, Tensor] | None = None) -> PeftModel:
        return METHODS[method].add(self.model, options_of(rank, seed), bases)

    def on(self, bases: Mapping[str, Tensor], rank: int) -> PeftModel:
        """The model with a core of zeros on a basis, given as ``<layer>.P`` and ``<layer>.Q``."""
        return self.adapter("random", rank, 0, bases)

    def moments(self, name: str, seed: int = SEED) -> dict[str, LayerMoments]:
        """The moments of a tenant's calibration rows, in batches of like length, so that little is padding."""
        bare = self.adapter("random", 1, 0)
        names = list(frozen_core_layers(bare, "default"))
        unload_adapter(bare)
        rows = self.tokens(calibration_rows(self.tenants[name].rows["train"], CALIBRATION, seed=seed))
        rows.sort(key=lambda row: len(row.input_ids))
        batches: Iterable[Batch] = make_batches(rows, pad_id=self.encoder.pad_id, batch_size=ROWS_A_STEP)
        layers = {layer: self.model.get_submodule(layer) for layer in names}
        return collect_moments(self.model, list(batches), layers, needs=CAPTURE_NEEDS)

    def basis(self, constructor: str, rank: int, seed: int = SEED) -> dict[str, Tensor]:
        """A basis for all tenants: of the pooled moments of the calibrated ones, if its constructor reads any."""

        def made() -> dict[str, Tensor]:
            pooled: dict[str, LayerMoments] = {}
            if METHODS[constructor].needs(options_of(rank, seed)):
                for name in self.calibrated:
                    for layer, found in self.moments(name, seed).items():
                        pooled[layer] = pooled[layer] + found if layer in pooled else found
            model = self.adapter(constructor, rank, seed)
            if pooled:
                calibrate(model, moments=pooled, progress=False)
            bases = get_bases(model)
            unload_adapter(model)
            return bases

        return self.stored(f"{constructor}-{rank}-{seed}", made)

    def stored(self, name: str, made: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a file of the work folder, which is written if it is not there."""
        file = self.work / f"{name}.safetensors"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            aside = file.with_suffix(".part")
            save_file({key: tensor.contiguous() for key, tensor in made().items()}, aside)
            aside.rename(file)
        return load_file(file)

    # -------------------------------------------------------------------------------------------------------- training

    def train_cores(
        self,
        model: PeftModel,
        jobs: Sequence[Job],
        seed: int = SEED,
        *,
        rows: Mapping[str, Sequence[TokenRow]] | None = None,
        epochs: int | None = None,
    ) -> dict[Job, Trained]:
        """Train tenants together from the model's own core; a core that diverged is zero.

        Args:
            rows: Other rows than all of a tenant's.
            epochs: Other epochs than the recipe's.
        """
        together = {}
        for name, rate in jobs:
            own = (rows or self.train_rows)[name]
            recipe = self.recipe(own, rate, seed)
            together[f"{name} {rate}"] = CoreTenant(own, replace(recipe, epochs=epochs or recipe.epochs))
        done: dict[str, Trained] = {}
        train_many(model, together, done.update, pad_id=self.encoder.pad_id)
        found = {job: done[f"{job[0]} {job[1]}"] for job in jobs}
        return {job: replace(one, cores=one.cores or zero_cores(model)) for job, one in found.items()}

    def own_lora(self, name: str, rank: int) -> dict[str, Tensor]:
        """The factors of a tenant's LoRA with a random start of its own, scored as it is trained."""

        def made() -> dict[str, Tensor]:
            model = self.adapter("lora", rank, self.start_of(name))
            self.train_alone(model, name, {RANK: LORA_RATE, 1: 1.6e-2}.get(rank, LORA_RATE))
            self.add_score(model, "lora", rank, name)
            factors = factors_of(model)
            unload_adapter(model)
            return factors

        return self.stored(f"lora-{rank}/{name}", made)

    def start_of(self, name: str) -> int:
        """The seed of a tenant's LoRA where each has one of its own."""
        return 1000 + self.everyone.index(name)

    def train_alone(self, model: PeftModel, name: str, rate: float, seed: int = SEED) -> Record:
        """Train what the model has to train on the rows of a tenant."""
        rows = self.train_rows[name]
        recipe = replace(self.recipe(rows, rate, seed), overhead_tokens=overhead_tokens_of(self.model))
        report = train(model, rows, recipe, pad_id=self.encoder.pad_id)
        return {"training_bytes": report.state_held_bytes, "steps": report.num_steps, "train_loss": report.final_loss}


def options_of(rank: int, seed: int) -> AdapterOptions:
    return AdapterOptions(rank, ATTENTION, seed, {})


def zero_cores(model: PeftModel) -> dict[str, Tensor]:
    layers = frozen_core_layers(model, "default")
    return {name: torch.zeros_like(layer.core("default")) for name, layer in layers.items()}


def bytes_of(model: PeftModel, *, shared: bool) -> Record:
    """Values that train, bytes of a tenant's saved folder, and bytes of its tensors in memory.

    On a shared basis P and Q are not the tenant's; the basis has a folder of its own.
    """
    layers = frozen_core_layers(model, "default")
    cores = [layer.factors("default") for layer in layers.values()]
    values = [R for _, _, R in cores] or [p for p in model.parameters() if p.requires_grad]
    held = values if shared or not cores else [tensor for factors in cores for tensor in factors]
    with TemporaryDirectory() as folder:
        basis, place = Path(folder) / "basis", Path(folder) / "tenant"
        if shared:
            save_basis(model, basis)
        model.save_pretrained(str(place))
        disk, of_basis = (
            sum(file.stat().st_size for file in one.glob("*") if file.suffix in (".safetensors", ".json"))
            for one in (place, basis)
        )
    return {
        "values": sum(value.numel() for value in values),
        "disk_bytes": disk,
        "memory_bytes": sum(tensor.nbytes for tensor in held),
        **({"basis_bytes": of_basis} if shared else {}),
    }


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


def pairs_of(stored: Mapping[str, Tensor]) -> Updates:
    """B and A by layer of what :func:`factors_of` gave."""
    return {key[:-2]: (stored[key], stored[f"{key[:-2]}.A"]) for key in stored if key.endswith(".B")}


# ------------------------------------------------------------------------------------------------------------ intervals


def with_interval(found: NDArray[np.float64], sources: Sequence[str]) -> tuple[float, float, float]:
    """The mean over tenants and seeds, and its 95 % interval.

    Tenants of one data set are alike, so each draw takes data sets with replacement, then as many tenants of each as it
    has, and seeds for all of them.

    Args:
        found: (tenants, seeds).
        sources: The data set of each tenant.
    """
    draw, num_seeds = np.random.default_rng(0), found.shape[1]
    members = [[i for i, source in enumerate(sources) if source == one] for one in dict.fromkeys(sources)]
    seeds = draw.integers(num_seeds, size=(DRAWS, num_seeds))
    by_tenant = found[:, seeds].mean(axis=2).T  # (draws, tenants)
    sums, counts = np.zeros(DRAWS), np.zeros(DRAWS)
    for drawn in draw.integers(len(members), size=(len(members), DRAWS)):
        for source, own in enumerate(members):
            taken = np.flatnonzero(drawn == source)
            tenants = np.array(own)[draw.integers(len(own), size=(len(taken), len(own)))]
            sums[taken] += by_tenant[taken[:, None], tenants].sum(axis=1)
            counts[taken] += len(own)
    low, high = np.quantile(sums / counts, [0.025, 0.975])
    return float(found.mean()), float(low), float(high)


MEASURES = {"accuracy": (100.0, 1), "loss": (1.0, 3)}
"""The factor and the digits with which a table shows a measure."""
Arm = tuple[str, int]
"""The name of an arm and its rank."""
Lines = Mapping[str, Sequence[Record]]
"""An arm's lines by tenant, one for each seed."""
Groups = Mapping[str, Sequence[tuple[str, str, int]]]
"""Arms (label, arm, rank) that are compared with the first of their group, on the tenants that all of them have."""


def arms_of(lines: Iterable[Record]) -> dict[Arm, Lines]:
    """Final lines by arm and tenant, one for each seed that has the most tenants; the base model is an arm of rank 0.

    Where rates were compared, the lines are those of the best rate on validation rows, among rates with most lines.
    """
    found: dict[Arm, dict[float | None, dict[int, dict[str, Record]]]] = {}
    for line in lines:
        if line["phase"] in ("base", "final"):
            rates = found.setdefault((line.get("arm", "base"), line.get("rank", 0)), {})
            rates.setdefault(line.get("learning_rate"), {}).setdefault(line.get("seed", SEED), {})[line["tenant"]] = (
                line
            )
    arms = {}
    for arm, rates in found.items():
        by_rate = []
        for seeds in rates.values():
            most = max(map(len, seeds.values()))
            whole = [of for _, of in sorted(seeds.items()) if len(of) == most]
            by_rate.append({name: [of[name] for of in whole] for name in TENANTS | QUICK_TENANTS if name in whole[0]})
        most = max(map(len, by_rate))
        arms[arm] = min((of for of in by_rate if len(of) == most), key=validated)
    return arms


def validated(arm: Lines) -> float:
    return fmean(line.get("validation_loss", 0.0) for own in arm.values() for line in own)


def values_of(arm: Lines, names: Sequence[str], measure: str) -> NDArray[np.float64]:
    """(tenants, seeds), accuracies in per cent."""
    return MEASURES[measure][0] * np.array([[line[measure] for line in arm[name]] for name in names])


def apart(arm: Lines, first: Lines, names: Sequence[str], measure: str) -> tuple[float, float, float]:
    """The mean difference and its interval."""
    found = values_of(arm, names, measure) - values_of(first, names, measure)
    return with_interval(found, [(TENANTS | QUICK_TENANTS)[name].task for name in names])


def less(arm: Lines, first: Lines, names: Sequence[str], measure: str) -> str:
    """The same for a table."""
    middle, low, high = (f"{x:+.{MEASURES[measure][1]}f}" for x in apart(arm, first, names, measure))
    return f"{middle} ({low} to {high})"


def groups_table(arms: Mapping[Arm, Lines], groups: Groups, more: str, cell: Callable[[list[Record]], str]) -> str:
    """Every group of which at least two arms are there.

    Args:
        more: The heading of one more column.
        cell: Its text for an arm's lines.
    """
    rows = []
    for group, members in groups.items():
        here = [(label, arms[arm, rank]) for label, arm, rank in members if (arm, rank) in arms]
        names = [name for name in here[0][1] if all(name in of for _, of in here)] if here else []
        if len(here) < 2 or len(names) < 2 or (members[0][1], members[0][2]) not in arms:
            continue
        first = here[0][1]
        for label, of in here:
            cells = []
            for measure, (_, digits) in MEASURES.items():
                cells.append(f"{values_of(of, names, measure).mean():.{digits}f}")
                cells.append("" if of is first else less(of, first, names, measure))
            shown = cell([line for name in names for line in of[name]])
            rows.append([f"{group}: {label}" if of is first else label, str(len(names)), shown, *cells])
    heads = ["each tenant has", "n", more, "accuracy, %", "minus first", "loss", "minus first"]
    return table(heads, rows) if rows else "Not measured yet.\n"


def open_study(kind: type[Opened], doc: str | None, name: str) -> Opened:
    """A study as the command line asks for it: the model, its tenants, the lines that are there."""
    parser = parser_of(doc, name, "jsonl")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--work", type=Path, help="Folder for trained adapters and bases; with --quick beside --out.")
    options = parser.parse_args()
    if (options.out is None and options.quick) or (options.work is None and not options.quick):
        parser.error("Give --work FOLDER, or with --quick --out FILE, because nothing of it belongs into the results.")
    out = options.out or RESULTS / f"{options.name}.jsonl"
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
        "model": fingerprint_model(model)[:16],
        "dtype": dtype,
        "commit": where["commit"][:12] if where["commit"] else None,
        "rows": sha256(dumps(manifest_of(tenants)).encode()).hexdigest()[:16],
        "recipe": f"{ROWS_A_STEP} rows a step, {FEWEST_STEPS} steps, warm-up {WARMUP}, calibration {CALIBRATION}",
    }
    results = Results(out, common, by=("arm", "rank", "seed", "tenant", "learning_rate"), varies=())
    encoder = PromptEncoder(tokenizer, style="plain")
    return kind(model, encoder, tenants, results, options.work or out.with_suffix(".work"), options.quick)
