"""What benchmarks/growth.py times: a calibration beside its floor, and a step beside floor and LoRA.

A point holds its models, so that all points can take turns; its counts are those of benchmarks/operations.py.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass

import torch
from peft import get_peft_model
from torch import Tensor, nn

from frozencore import FrozenCoreConfig, calibrate
from frozencore.tune.methods import METHODS, AdapterOptions
from operations import (
    Architecture,
    core_operations,
    lora_operations,
    pass_operations,
    product_bytes,
    product_operations,
    svd_operations,
    uses_krylov,
)
from step import ATTENTION, Contestant, Setting, batch_of, timed, wide_model

SEQUENCE, COMPLETION, ROWS = 64, 16, 8
STEP_TOKENS = 256
STEP_CONTESTANTS = ("floor", "lora", "frozencore")
TARGET_SETS: dict[str, list[str]] = {
    "q": ["q_proj"],
    "q, v": ["q_proj", "v_proj"],
    "q, k, v, o": ATTENTION,
    "all linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
}


@dataclass(frozen=True)
class Job:
    """A calibration of a random model."""

    width: int = 256
    num_layers: int = 4
    num_examples: int = 64
    rank: int = 16


@dataclass(frozen=True)
class StepJob:
    """A training step: what is adapted, at which rank."""

    targets: str = "q, k, v, o"
    rank: int = 16


def architecture(width: int, num_layers: int) -> Architecture:
    """The sizes of ``step.wide_model``."""
    return Architecture(
        width, 11 * width // 4, num_layers, num_heads=8, num_kv_heads=2, vocabulary=24 * width, head_size=width // 8
    )


class CalibrationPoint:
    """A job with its model, ready to be timed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.base = wide_model(job.num_layers, job.width).eval().requires_grad_(False)
        config = FrozenCoreConfig(r=job.rank, target_modules=ATTENTION, constructor="fcca", task_type="CAUSAL_LM")
        self.adapted = get_peft_model(deepcopy(self.base), config)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(24 * job.width, (job.num_examples, SEQUENCE), generator=generator)
        labels = ids.clone()
        labels[:, : SEQUENCE - COMPLETION] = -100
        self.batches = [
            {"input_ids": ids[i : i + ROWS], "labels": labels[i : i + ROWS]} for i in range(0, len(ids), ROWS)
        ]

    def counts(self) -> dict[str, int]:
        """Operations, bytes and calls of this job."""
        job, model = self.job, architecture(self.job.width, self.job.num_layers)
        targets, num_tokens = model.targets(), job.num_examples * SEQUENCE
        svds = {True: 0, False: 0}
        for shape in targets:
            svds[uses_krylov(shape, job.rank)] += svd_operations(shape, job.rank)
        return {
            "num_targets": len(targets),
            "num_batches": len(self.batches),
            "pass_operations": pass_operations(model, num_tokens, SEQUENCE, job.num_examples * COMPLETION),
            "block_activations": num_tokens * job.num_layers * (model.width + model.intermediate),
            "product_operations": product_operations(targets, num_tokens),
            "product_bytes": product_bytes(targets, len(self.batches)),
            "krylov_operations": svds[True],
            "gram_operations": svds[False],
        }

    def warm_up(self) -> None:
        self.floor(self.batches[:1])
        calibrate(self.adapted, self.batches[:1], progress=False)

    def floor(self, batches: list[dict[str, Tensor]]) -> None:
        kept = torch.arange(SEQUENCE - COMPLETION - 1, SEQUENCE - 1)
        for batch in batches:
            embeds = self.base.get_input_embeddings()(batch["input_ids"]).requires_grad_()
            targets = batch["labels"][:, kept + 1]
            self.base(inputs_embeds=embeds, logits_to_keep=kept, labels=targets, shift_labels=targets).loss.backward()

    def round(self) -> dict[str, float]:
        """Seconds of the floor, of the pass that collects moments, and of the bases."""
        floor_s = timed(lambda: self.floor(self.batches))
        marks = {"start": time.process_time()}
        calibrate(self.adapted, self.batches, progress=lambda stage, *_: marks.update({stage: time.process_time()}))
        end = time.process_time()
        return {
            "floor_s": floor_s,
            "collect_s": marks["calibration"] - marks["start"],
            "build_s": end - marks["calibration"],
        }


class StepPoint:
    """A floor, LoRA and frozen cores on copies of one model."""

    def __init__(self, job: StepJob, base: nn.Module) -> None:
        self.job = job
        batch = batch_of(Setting(job.targets, 1, STEP_TOKENS), base.config.vocab_size)
        self.contestants = {name: Contestant(self._adapted(base, name), batch) for name in STEP_CONTESTANTS}

    def counts(self) -> dict[str, int]:
        layers = dict(self.contestants["floor"].model.named_modules())
        ends = tuple(f".{name}" for name in TARGET_SETS[self.job.targets])
        shapes = [(m.out_features, m.in_features) for name, m in layers.items() if name.endswith(ends)]
        return {
            "num_targets": len(shapes),
            "core_operations": core_operations(shapes, self.job.rank, STEP_TOKENS),
            "lora_operations": lora_operations(shapes, self.job.rank, STEP_TOKENS),
        }

    def _adapted(self, base: nn.Module, contestant: str) -> nn.Module:
        model, modules = deepcopy(base), TARGET_SETS[self.job.targets]
        if contestant == "floor":
            model.requires_grad_(False).enable_input_require_grads()
        elif contestant == "lora":
            model = METHODS["lora"].add(model, AdapterOptions(self.job.rank, tuple(modules), seed=0, core={}))
        else:
            config = FrozenCoreConfig(r=self.job.rank, target_modules=modules, constructor="random")
            model = get_peft_model(model, config)
        return model.train()

    def warm_up(self) -> None:
        self.round()

    def round(self) -> dict[str, float]:
        return {f"{name}_s": timed(contestant.step) for name, contestant in self.contestants.items()}
