"""Private training on SmolLM2: what epsilon costs a core on a public basis, a core on a random one, and LoRAs.

    make smollm2
    OMP_NUM_THREADS=1 python benchmarks/private.py --data-root DIR                  # hours; goes on where it stopped
    OMP_NUM_THREADS=1 python benchmarks/private.py --data-root DIR --arms random    # one arm, beside another process
    python benchmarks/private.py --quick --out FILE     # the pocket model and its rows: does it run?

The arms: ``public`` is a core on FCCA's basis of QNLI's rows, which count as public; ``random`` a core on a random
basis; ``lora-1`` and ``lora-16`` are LoRAs. A core trains by ``frozencore.PrivateTraining``, a LoRA under the hooks
and the optimizer of Opacus. All have the same rows, the same steps of rows drawn at random, the same noise multiplier,
delta, warm-up, schedule and AdamW. Without an epsilon the arms train plainly, on as many rows a step.

The learning rate of each arm is searched at the middle epsilon with the first seed, by factors of two until the best
one has others on both sides; then the clipping length, a tenth of the default and ten times as much. The search scores
validation rows, which count as public too. Its result holds for every epsilon and seed; plain training has a search of
its own. A line of the results is one training: loss in nats per answer token, and accuracy, on rows that no search saw.
Beside the suite's tasks there are two that a model of this size learns from few rows: ``svamp-operation``, name the
operation that solves a word problem, and ``hellaswag-activity``, name what a caption shows, out of four activities.

The draws and the noise come from the system's randomness, so two runs differ. A seed names a random basis, the start
of a LoRA, and the order of plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from contestants import ATTENTION, batches_by_length
from frozencore.privacy import PrivateBudget, Schedule
from frozencore.tune.methods import METHODS, AdapterOptions
from frozencore.tune.rows import Example, Row, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.forward import completion_logprobs, take_off
from frozencore.tune.suite import find_task
from frozencore.tune.tasks import Origin, Split, Task
from frozencore.tune.tasks.math_problems import SVAMP
from frozencore.tune.tasks.questions import HELLASWAG, without_tags
from frozencore.tune.tasks.splits import calibration_rows, split_task
from frozencore.tune.training.batching import pass_tokens_of
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train
from harness import Record, Results, best_rate, parser_of
from studies import begun, chosen_bases, score, token_rows
from tenant_rows import Made, operation

METHOD_OF = {"public": ("fcca", 16), "random": ("random", 16), "lora-1": ("lora", 1), "lora-16": ("lora", 16)}
RATES = {True: {"public": 1e-2, "random": 8e-2, "lora-1": 3.2e-2, "lora-16": 8e-3},
         False: {"public": 1e-2, "random": 4e-2, "lora-1": 8e-3, "lora-16": 4e-3}}  # fmt: skip
"""Where a search begins, private or not: this rate, twice it and half of it. They are the best rates on SST-2."""
CLIPS = (0.1, 10.0)
WARMUP = 0.1
ROWS_A_PASS, ROWS_AT_ONCE = 16, 8  # of a core's training; of a calibration, and under Opacus's hooks


@dataclass(frozen=True)
class Scale:
    """The size of the study; ``public`` is the task of the public rows."""

    rows: int = 1000
    rows_a_step: int = 32
    epochs: int = 1
    scored: int = 400
    calibration: int = 128
    delta: float = 1e-5
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    seeds: tuple[int, ...] = (42, 43, 44)
    public: str = "qnli"


QUICK = Scale(
    rows=24, rows_a_step=8, scored=8, calibration=8, delta=1e-2, epsilons=(8.0,), seeds=(42,),
    public="pocket-entailment",
)  # fmt: skip


def operation_of(row: Row, row_id: str) -> Example:
    """A word problem of SVAMP with its operation as the answer; the data set misspells one "Common-Divison"."""
    spelled = {**row, "Type": str(row["Type"]).replace("Divison", "Division")}
    return operation(signs=False)(Made(spelled, SVAMP.to_example(spelled, row_id), place=0.0))


def operation_task(data_root: Path | None) -> Task:
    return replace(SVAMP, name="svamp-operation", scoring="choice", to_example=operation_of, num_train=560)


@dataclass(frozen=True)
class Captions:
    """HellaSwag's rows: one of each video to train on, and to be scored on those whose activity is among them."""

    origin: Origin = HELLASWAG.source.origin

    def rows(self, split: Split, data_root: Path | None) -> list[Row]:
        seen = HELLASWAG.source.rows("train", data_root)
        if split == "train":
            return list({row["source_id"]: row for row in seen}.values())
        known = {row["activity_label"] for row in seen}
        return [row for row in HELLASWAG.source.rows(split, data_root) if row["activity_label"] in known]


def activity_task(data_root: Path | None) -> Task:
    """Captions of HellaSwag, each with its activity and three others as choices."""
    activities = sorted({str(row["activity_label"]) for row in HELLASWAG.source.rows("train", data_root)})

    def activity_of(row: Row, row_id: str) -> Example:
        own, drawn = str(row["activity_label"]), Random(row_id)
        choices = [own, *drawn.sample([other for other in activities if other != own], 3)]
        drawn.shuffle(choices)
        prompt = f"Caption: {without_tags(str(row['ctx']))}\nActivity:"
        return Example(row_id, prompt, f" {own}", tuple(f" {choice}" for choice in choices))

    return replace(HELLASWAG, name="hellaswag-activity", source=Captions(), to_example=activity_of, num_train=640)


OWN_TASKS: dict[str, Callable[[Path | None], Task]] = {
    "svamp-operation": operation_task, "hellaswag-activity": activity_task,
}  # fmt: skip


@dataclass
class Study:
    """The model, the rows of a task, and what has been measured."""

    model: PreTrainedModel
    encoder: PromptEncoder
    task: str
    data_root: Path | None
    scale: Scale
    results: Results

    def __post_init__(self) -> None:
        task = OWN_TASKS[self.task](self.data_root) if self.task in OWN_TASKS else find_task(self.task)
        rows = min(self.scale.rows, task.num_train)
        splits = split_task(task, self.data_root, num_train=rows, num_evaluation=self.scale.scored)
        self.parts = {"validation": splits.validation, "evaluation": splits.evaluation}
        self.rows = token_rows(self.encoder, splits.train)

    @property
    def public_rows(self) -> list[TokenRow]:
        sizes = {"num_train": self.scale.calibration, "num_evaluation": self.scale.scored}
        public = split_task(find_task(self.scale.public), self.data_root, **sizes).train
        return token_rows(self.encoder, calibration_rows(public, self.scale.calibration))

    @cached_property
    def public_basis(self) -> dict[str, Tensor]:
        """FCCA's basis of the public rows."""
        batches = batches_by_length(self.public_rows, self.encoder.pad_id, ROWS_AT_ONCE)
        return chosen_bases(self.adapter("public", self.scale.seeds[0], None), batches)

    def adapter(self, arm: str, seed: int, bases: dict[str, Tensor] | None) -> PeftModel:
        method, rank = METHOD_OF[arm]
        return METHODS[method].add(self.model, AdapterOptions(rank, ATTENTION, seed, {}), bases)

    def run(self, arms: Sequence[str]) -> None:
        """Measure what is missing: all searches first, then seed by seed."""
        if not self.results.has(phase="base", task=self.task):
            found = score(self.model, self.encoder, self.parts["evaluation"])
            self.results.add(phase="base", task=self.task, **found)
        middle = self.scale.epsilons[len(self.scale.epsilons) // 2]
        best = {arm: self.search(arm, middle) for arm in arms}
        for seed in self.scale.seeds:
            for epsilon in self.scale.epsilons:
                for arm in arms:
                    self.measure("final", arm, epsilon, seed, *best[arm])
        plain = {arm: self.search(arm, None) for arm in arms}
        for seed in self.scale.seeds:
            for arm in arms:
                self.measure("final", arm, None, seed, *plain[arm])

    def search(self, arm: str, epsilon: float | None) -> tuple[float, float | None]:
        """The learning rate and the clipping length with the lowest loss on validation rows."""
        clip = None if epsilon is None else 1.0

        def tried(rate: float, clip: float | None) -> float:
            loss: float = self.measure("search", arm, epsilon, self.scale.seeds[0], rate, clip)["loss"]
            return loss

        first = RATES[epsilon is not None][arm]
        best, loss = best_rate(first, lambda rates: {rate: tried(rate, clip) for rate in rates})
        if clip is None:
            return best, None
        of_clips = {clip: loss} | {other: tried(best, other) for other in CLIPS}
        return best, min(of_clips, key=of_clips.__getitem__)

    def measure(
        self, phase: str, arm: str, epsilon: float | None, seed: int, rate: float, clip: float | None
    ) -> Record:
        """The line of a training, which is made unless it is there."""
        named = {
            "phase": phase, "task": self.task, "arm": arm, "epsilon": epsilon, "seed": seed,
            "learning_rate": rate, "clip": clip,
        }  # fmt: skip
        if not self.results.has(**named):
            model = self.adapter(arm, seed, self.public_basis if arm == "public" else None)
            try:
                found = self.trained(model, epsilon, seed, rate, clip)
                found |= score(model, self.encoder, self.parts["validation" if phase == "search" else "evaluation"])
            finally:
                take_off(model)
            self.results.add(**named, **found)
        return self.results.get(**named)

    def trained(self, model: PeftModel, epsilon: float | None, seed: int, rate: float, clip: float | None) -> Record:
        """Train the adapter, privately if there is an epsilon."""
        values = sum(p.numel() for p in model.parameters() if p.requires_grad)
        size = self.scale.rows_a_step
        recipe = Recipe(
            rate, WARMUP, epochs=self.scale.epochs, batch_size=min(ROWS_A_PASS, size),
            accumulation=max(1, size // ROWS_A_PASS), seed=seed,
        )  # fmt: skip
        steps = recipe.num_steps(len(self.rows))
        if epsilon is None or clip is None:
            plain = replace(recipe, pass_tokens=pass_tokens_of(self.model))
            report = train(model, self.rows, plain, pad_id=self.encoder.pad_id)
            return {"values": values, "steps": steps, "train_loss": report.final_loss}
        budget = PrivateBudget(epsilon, self.scale.delta, clip)
        schedule = Schedule.of(budget, len(self.rows), size, steps)
        if model.peft_config["default"].peft_type == "LORA":
            loss = self.train_under_opacus(model, recipe, schedule)
        else:
            report = train(model, self.rows, replace(recipe, private=budget), pad_id=self.encoder.pad_id)
            assert report.schedule == schedule
            loss = report.final_loss
        noise, spent = schedule.noise_multiplier, schedule.spent(steps)
        return {"values": values, "steps": steps, "train_loss": loss, "noise_multiplier": noise, "spent": spent}

    def train_under_opacus(self, model: PeftModel, recipe: Recipe, schedule: Schedule) -> float:
        """The training of a LoRA; returns the mean loss over the rows of the last pass."""
        torch.seed()  # of the noise
        drawn = np.random.default_rng()
        hooked = GradSampleModule(model.train(), strict=False, loss_reduction="sum")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = DPOptimizer(
            torch.optim.AdamW(trained, weight_decay=0.0), noise_multiplier=schedule.noise_multiplier,
            max_grad_norm=schedule.budget.clip, expected_batch_size=schedule.rows_a_step,
        )  # fmt: skip
        loss = float("nan")
        for step in range(schedule.num_steps):
            own = np.flatnonzero(drawn.random(len(self.rows)) < schedule.sample_rate)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step, schedule.num_steps)
            batches = batches_by_length((self.rows[i] for i in own), self.encoder.pad_id, ROWS_AT_ONCE)
            for number, batch in enumerate(batches):
                logprobs, counted = completion_logprobs(hooked, batch)
                losses = -logprobs.sum(1) / counted.sum(1)
                losses.sum().backward()
                loss = float(losses.detach().mean())
                optimizer.signal_skip_step(do_skip=number + 1 < len(batches))  # only the last pass adds noise and steps
                optimizer.step()
                optimizer.zero_grad()
        hooked.to_standard_module()
        model.eval()
        return loss


def main() -> None:
    parser = parser_of(__doc__, "private", "jsonl")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--arms", nargs="+", choices=METHOD_OF, default=list(METHOD_OF))
    options, model, encoder, common = begun(parser, "opacus")
    task, scale = ("pocket-sentiment", QUICK) if options.quick else (options.task, Scale())
    by, varies = ("task", "arm", "epsilon", "seed"), ("learning_rate", "clip")
    results = Results(options.out, common | {"scale": asdict(scale)}, by=by, varies=varies)
    study = Study(model, encoder, task, options.data_root, scale, results)
    results.common["rows"] = sha256(repr([row.trained_on for row in study.rows]).encode()).hexdigest()
    study.run(options.arms)


if __name__ == "__main__":
    main()
