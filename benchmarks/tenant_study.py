"""A model and its tenants: how adapters of tenants are made and trained, and the lines that hold their scores.

The tenants are those of tenant_rows.py, and all train by one recipe. A line of the results is one tenant in one arm, at
one rank, seed and learning rate: loss in nats per answer token without the end token, and accuracy. Lines that are
there are not measured again. Prompts are plain, and attention is ``eager``, which on a CPU trains short rows faster.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from json import dumps
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import strftime
from typing import Any, ClassVar

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from contestants import ATTENTION
from frozencore import Core, basis_id, calibrate, frozen_core_layers, get_basis, save_basis, swap_core
from frozencore.calibration.collect import collect_moments
from frozencore.maths.basis import LayerBasis, known_basis
from frozencore.maths.capture import CAPTURE_NEEDS
from frozencore.maths.moments import LayerMoments, MomentName
from frozencore.tune.adapters import add_adapter
from frozencore.tune.load import load_model
from frozencore.tune.many.tenant import Tenant as CoreTenant
from frozencore.tune.many.tenant import Trained, train_many
from frozencore.tune.methods import METHODS, MethodConfig
from frozencore.tune.provenance import Provenance
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row, TokenRow
from frozencore.tune.rows.splits import calibration_rows
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from frozencore.tune.training.trainer import overhead_tokens_of
from harness import Record, lines_of
from tenant_rows import SEARCHED, Tenant

SEED, RANK = 42, 16
START_SEED = 1000  # of the first tenant's own start
ROWS_A_STEP, FEWEST_STEPS, WARMUP = 8, 16, 0.1
CALIBRATION = 64  # rows of each tenant
RECIPE = f"{ROWS_A_STEP} rows a step, {FEWEST_STEPS} steps, warm-up {WARMUP}, calibration {CALIBRATION}"
MOST_RATES = 6
ALL_LINEAR = ", all linear layers"
"""The end of the name of an arm whose adapters are on all linear layers."""

Job = tuple[str, float | None]
"""A tenant and its learning rate; None where an arm trains nothing, or at one rate only."""
Adapters = Iterator[tuple[PeftModel, Job, Record]]
"""The model with the adapter of each job, which is gone at the next; and what the adapter's line says of it."""
Updates = dict[str, tuple[Tensor, Tensor]]
"""B and A of an update by layer."""


def key(
    arm: str, rank: int, tenant: str, rate: float | None = None, *, seed: int = SEED, phase: str = "final"
) -> Record:
    """The fields that name a line."""
    return {"phase": phase, "arm": arm, "rank": rank, "seed": seed, "tenant": tenant, "learning_rate": rate}


def study_model(options: Namespace, dtype: str, device: str = "cpu") -> tuple[Any, PromptEncoder, Record]:
    """The model of a study, its encoder of plain prompts, and the commit and device that stand in each line."""
    torch.set_num_threads(1)
    model, tokenizer = load_model("pocket" if options.quick else options.model, dtype=dtype, device=device)
    model.set_attn_implementation("eager")  # on a CPU faster for short rows
    where = Provenance.here().content()
    about = {"commit": where["commit"][:12] if where["commit"] else None, "device": where["device"]}
    return model, PromptEncoder(tokenizer, style="plain"), about


def rows_of(file: Path) -> list[Row]:
    """The rows of a file with ``prompt`` and ``completion``."""
    return [Row(str(i), row["prompt"], row["completion"]) for i, row in enumerate(lines_of(file))]


class Results:
    """The lines of a file, one for each measurement; one that is there need not be made again.

    Args:
        common: Fields of every line that is added; those of the file must have the same, but for commit and device.
        names: The fields that name a line.
    """

    def __init__(self, file: Path, common: Record, names: Sequence[str] = (*key("", 0, ""),)) -> None:
        self.file, self.common, self.names = file, common, names
        self.found: dict[tuple[Any, ...], Record] = {}
        for line in lines_of(file) if file.exists() else ():
            for name, value in common.items():
                if name not in ("commit", "device") and line.get(name) != value:
                    raise SystemExit(f"{file} was measured with other {name}. Give another --out.")
            self.found[self._named(line)] = line

    def _named(self, line: Record) -> tuple[Any, ...]:
        return tuple(rounded(line[name]) for name in self.names)

    def get(self, line: Record) -> Record | None:
        """The line of those fields; None if it is not measured."""
        return self.found.get(self._named(line))

    def add(self, line: Record) -> None:
        whole = {name: rounded(value) for name, value in {**line, **self.common}.items()}
        self.found[self._named(whole)] = whole
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(dumps(whole) + "\n")
        shown = {name: whole[name] for name in (*self.names, "rate", "loss", "accuracy") if name in whole}
        print(strftime("%H:%M:%S"), *(f"{name}={value}" for name, value in shown.items()), flush=True)


def rounded(value: Any) -> Any:
    """A number with the six digits that a line keeps."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@dataclass
class Study:
    """A model, its tenants as text and as tokens, what has been measured, and a folder for what was trained."""

    model: PreTrainedModel
    encoder: PromptEncoder
    tenants: Mapping[str, Tenant]
    results: Results
    work: Path
    quick: bool
    targets: tuple[str, ...] | str = ATTENTION
    calibration: ClassVar[int] = CALIBRATION

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

    def tokens(self, examples: Sequence[Row]) -> list[TokenRow]:
        return self.encoder.encode(examples)

    def recipe(self, rows: Sequence[TokenRow], rate: float, seed: int = SEED) -> Recipe:
        """As many epochs as make sixteen steps."""
        epochs = math.ceil(FEWEST_STEPS / math.ceil(len(rows) / ROWS_A_STEP))
        return Recipe(rate, WARMUP, epochs=epochs, batch_size=ROWS_A_STEP, accumulation=1, seed=seed)

    # --------------------------------------------------------------------------------------------------------- results

    def score(self, model: Any, name: str, part: str) -> Record:
        """Loss in nats per token of the right answers, and the share of rows whose right answer is the likeliest."""
        rows = self.tokens(self.tenants[name].rows[part])
        choices = [row.choices for row in rows if row.choices is not None]
        predictions = predict_choices(model, choices, pad_id=self.encoder.pad_id)
        nats = -sum(one.logprobs[row.right] for one, row in zip(predictions, choices, strict=True))
        count = sum(len(row.choice_ids[row.right]) for row in choices)
        return {"loss": nats / count, "accuracy": fmean(one.correct for one in predictions)}

    def measure(
        self,
        arm: str,
        rank: int,
        jobs: Sequence[Job],
        adapters: Callable[[Sequence[Job]], Adapters],
        *,
        seed: int = SEED,
        phase: str = "final",
        validates: bool = False,
    ) -> None:
        """Add the lines of an arm that are not there.

        Args:
            adapters: Makes the adapters of the jobs without a line.
            validates: Score validation rows too.
        """
        part = "validation" if phase == "search" else "held-out"
        missing = [job for job in jobs if not self.results.get(key(arm, rank, *job, seed=seed, phase=phase))]
        for model, job, about in adapters(missing) if missing else ():
            more = {"validation_loss": self.score(model, job[0], "validation")["loss"]} if validates else {}
            line = key(arm, rank, *job, seed=seed, phase=phase)
            self.results.add({**line, **self.score(model, job[0], part), **about, **more})

    def measure_base(self) -> None:
        """Add the lines of the base model."""
        everyone: list[Job] = [(name, None) for name in self.everyone]
        self.measure("base", 0, everyone, lambda jobs: ((self.model, job, {}) for job in jobs))

    def searched_rate(self, first: float, arm: str, rank: int, adapters: Callable[[Sequence[Job]], Adapters]) -> float:
        """The learning rate with the lowest mean loss on validation rows of some tenants.

        The search tries ``first``, twice it and half of it, and goes on by factors of two until the best rate has
        others on both sides, or MOST_RATES are tried.
        """
        wanted, losses = [first / 2, first, 2 * first], dict[float, float]()
        while wanted and len(losses) < MOST_RATES:
            jobs = [(name, rate) for rate in wanted for name in self.searched]
            self.measure(arm, rank, jobs, adapters, phase="search")
            for rate in wanted:
                lines = (self.results.get(key(arm, rank, name, rate, phase="search")) for name in self.searched)
                losses[rate] = fmean(line["loss"] for line in lines)
            best = min(losses, key=losses.__getitem__)
            wanted = [best / 2] if best == min(losses) else [2 * best] if best == max(losses) else []
        return best

    # ----------------------------------------------------------------------------------------------- adapters and bases

    def adapted(
        self, method: str, rank: int, seed: int = SEED, bases: Mapping[str, Tensor] | None = None
    ) -> AbstractContextManager[PeftModel]:
        """The model with a new adapter, on a basis if there is one; see :func:`adapted`."""
        layers = bases and {
            at[:-2]: known_basis(P, bases[f"{at[:-2]}.Q"]) for at, P in bases.items() if at.endswith(".P")
        }
        return adapted(self.model, method, rank, seed, layers, targets=self.targets)

    def moments(self, name: str, seed: int = SEED, needs: Set[MomentName] = CAPTURE_NEEDS) -> dict[str, LayerMoments]:
        """The moments of a tenant's calibration rows, in batches of like length, so that little is padding."""
        with self.adapted("random", 1, 0) as bare:
            names = list(frozen_core_layers(bare, "default"))
        rows = self.tokens(calibration_rows(self.tenants[name].rows["train"], self.calibration, seed=seed))
        layers = {layer: self.model.get_submodule(layer) for layer in names}
        batches = calibration_batches(rows, self.encoder.pad_id)
        return collect_moments(self.model, batches, layers, needs=needs)

    def basis(self, constructor: str, rank: int, seed: int = SEED) -> dict[str, Tensor]:
        """A basis for all tenants: of the pooled moments of the calibrated ones, if its constructor reads any."""

        def made() -> dict[str, Tensor]:
            pooled: dict[str, LayerMoments] = {}
            if needs := METHODS[constructor].needs(MethodConfig(name=constructor)):
                for name in self.calibrated:
                    for layer, found in self.moments(name, seed, needs).items():
                        pooled[layer] = pooled[layer] + found if layer in pooled else found
            with self.adapted(constructor, rank, seed) as model:
                if pooled:
                    calibrate(model, moments=pooled, progress=False)
                return get_basis(model).tensors

        return self.stored(f"{constructor}-{rank}-{seed}", made)

    def stored(self, name: str, made: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a file of the work folder, which is written if it is not there."""
        file = self.work / f"{name}.safetensors"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            aside = file.with_suffix(".part")
            save_file({at: tensor.contiguous() for at, tensor in made().items()}, aside)
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
        return {job: replace(one, core=one.core or zero_core(model)) for job, one in found.items()}

    def cores(
        self, model: PeftModel, jobs: Sequence[Job], seed: int = SEED, *, shared: bool = True, **other: Any
    ) -> Adapters:
        """Tenants that train together on the basis of the model; ``other`` is of :meth:`train_cores`."""
        sizes = {**bytes_of(model, shared=shared), "basis": basis_id(model)}
        for job, trained in self.train_cores(model, jobs, seed, **other).items():
            swap_core(model, trained.core)
            report = trained.report
            about = {"training_bytes": report.state_held_bytes, "steps": report.training.num_steps}
            yield model, job, {**sizes, **about, "train_loss": report.training.final_loss}

    def on(self, bases: Mapping[str, Tensor], rank: int, jobs: Sequence[Job], seed: int = SEED) -> Adapters:
        """Cores on one basis, given as ``<layer>.P`` and ``<layer>.Q``."""
        with self.adapted("random", rank, 0, bases) as model:
            yield from self.cores(model, jobs, seed)

    def on_own_bases(self, jobs: Sequence[Job], rank: int, seed: int = SEED) -> Adapters:
        """Cores on FCCA of each tenant's own rows."""
        for name in dict.fromkeys(name for name, _ in jobs):
            moments = self.moments(name, seed)  # before the model has an adapter
            with self.adapted("fcca", rank, seed) as model:
                calibrate(model, moments=moments, progress=False)
                yield from self.cores(model, [job for job in jobs if job[0] == name], seed, shared=False)

    def loras(
        self,
        jobs: Sequence[Job],
        rank: int,
        seed: int = SEED,
        *,
        start_seed: int | None = None,
        factors: Updates | None = None,
    ) -> Adapters:
        """A LoRA for each job.

        Args:
            start_seed: The seed of the first tenant's random start, the next one's is one higher; None is ``seed`` for
                all.
            factors: B and A by layer from which all start.
        """
        for name, rate in jobs:
            start = seed if start_seed is None else start_seed + self.everyone.index(name)
            with self.adapted("lora", rank, start) as model:
                put_factors(model, factors or {})
                about = self.train_alone(model, name, rate, seed)
                yield model, (name, rate), {**about, **bytes_of(model, shared=False)}

    def train_alone(self, model: PeftModel, name: str, rate: float, seed: int = SEED) -> Record:
        """Train what the model has to train on the rows of a tenant."""
        rows = self.train_rows[name]
        recipe = replace(self.recipe(rows, rate, seed), overhead_tokens=overhead_tokens_of(self.model))
        report = train(model, rows, recipe, pad_id=self.encoder.pad_id)
        return {
            "training_bytes": report.state_held_bytes,
            "steps": report.training.num_steps,
            "train_loss": report.training.final_loss,
        }

    def update(self, arm: str, rank: int, name: str, rate: float, seed: int = SEED) -> Updates:
        """A tenant's own adapter, ``own`` or ``lora``; that of the first seed is scored.

        Each tenant has a random start of its own, but with ``lora, one seed`` all have the same.
        """

        def made() -> dict[str, Tensor]:
            job, factors = (name, rate), {}
            first = None if arm.endswith("one seed") else START_SEED * (1 + seed - SEED)
            one = (
                self.on_own_bases([job], rank, seed)
                if arm == "own"
                else self.loras([job], rank, seed, start_seed=first)
            )
            for model, _, _ in one:
                if seed == SEED:
                    self.results.add({**key(arm, rank, name), **self.score(model, name, "held-out")})
                factors = factors_of(model)
            return factors

        folder = f"{arm}-{rank}" if seed == SEED else f"{arm}-{rank}-{seed}"
        stored = self.stored(f"{folder}/{name}", made)
        return {at[:-2]: (stored[at], stored[f"{at[:-2]}.A"]) for at in stored if at.endswith(".B")}


@contextmanager
def adapted(
    model: nn.Module,
    method: str,
    rank: int,
    seed: int = SEED,
    layers: Mapping[str, LayerBasis] | None = None,
    *,
    targets: tuple[str, ...] | str = ATTENTION,
) -> Iterator[PeftModel]:
    """The model with a new adapter, by default on the attention layers, which is unloaded afterwards."""
    options = MethodConfig(name=method, r=rank, target_modules=targets, seed=seed)
    made = add_adapter(METHODS[method], model, options, layers)
    try:
        yield made
    finally:
        unload_adapter(made)


def zero_core(model: PeftModel) -> Core:
    layers = frozen_core_layers(model, "default")
    return Core.of(basis_id(model), {name: torch.zeros_like(layer.core("default")) for name, layer in layers.items()})


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


def product_svd(B: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V of ``B A``, from the factors alone."""
    (left, L), (right, R) = torch.linalg.qr(B), torch.linalg.qr(A.mT)
    U, S, Vh = torch.linalg.svd(L @ R.mT)
    return left @ U, S, right @ Vh.mT


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


def put_factors(model: PeftModel, factors: Updates) -> None:
    """Make these the factors of a LoRA of scale 1."""
    for name, (B, A) in factors.items():
        module: Any = model.get_base_model().get_submodule(name)
        with torch.no_grad():
            module.lora_B["default"].weight.copy_(B)
            module.lora_A["default"].weight.copy_(A)
