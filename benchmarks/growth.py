"""The growth of cost: calibration against examples, width, layers and rank; a training step against rank and targets.

    python benchmarks/growth.py            # about four minutes;  --quick: one tiny round that only shows that it runs

Seconds of CPU on one thread. In a round every point of every sweep runs once, beside its floor: a plain forward and
backward pass over the same batches, gradients passed through every layer, logits at completion positions only. The
points are random models of the Qwen2 family, eight examples of 64 tokens a batch, the last quarter completion; q, k, v
and o are calibrated with ``fcca``. Steps are those of benchmarks/step.py, on one row of 256 tokens.

Beside the medians stand the rates of this machine (a float32 matrix product, a copy), and constants fitted to all
points: seconds per operation and per call, with the operations counted by benchmarks/shapes.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from peft import get_peft_model
from torch import nn

import cost_tables
from contestants import (
    ATTENTION,
    FLOOR,
    UNCALIBRATED,
    Stepper,
    adapter_config,
    completion_batch,
    labelled_batch,
    plain_passes,
    random_ids,
    random_qwen2,
    with_adapter,
)
from fitting import fit_constants
from frozencore import calibrate
from harness import cpu_s, load_average, parser_of, processor, write_found
from shapes import (
    Architecture,
    core_operations,
    lora_operations,
    pass_operations,
    product_bytes,
    product_operations,
    svd_operations,
    uses_krylov,
)

SEQUENCE, COMPLETION, ROWS = 64, 16, 8
STEP_TOKENS = 256
TARGET_SETS: dict[str, tuple[str, ...]] = {
    "q": ("q_proj",),
    "q, v": ("q_proj", "v_proj"),
    "q, k, v, o": ATTENTION,
    "all linear": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
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


@dataclass(frozen=True)
class Plan:
    """The varied sizes, one at a time, around the first job."""

    job: Job
    sweeps: dict[str, tuple[int, ...]]
    step_width: int
    step_layers: int
    step_ranks: tuple[int, ...]
    step_targets: tuple[str, ...]

    def jobs(self) -> list[Job]:
        """Each once."""
        varied = [replace(self.job, **{name: value}) for name, values in self.sweeps.items() for value in values]
        return list(dict.fromkeys(varied))

    def step_jobs(self) -> list[StepJob]:
        varied = [StepJob(rank=rank) for rank in self.step_ranks] + [StepJob(targets=t) for t in self.step_targets]
        return list(dict.fromkeys(varied))


FULL = Plan(
    job=Job(),
    sweeps={
        "num_examples": (16, 32, 64, 128, 256),
        "width": (128, 256, 512, 1024),
        "num_layers": (1, 2, 4, 8, 16),
        "rank": (4, 8, 16, 32, 64),
    },
    step_width=512, step_layers=4, step_ranks=(4, 8, 16, 32, 64, 128), step_targets=tuple(TARGET_SETS),
)  # fmt: skip
QUICK = Plan(
    job=Job(width=64, num_layers=1, num_examples=8, rank=4),
    sweeps={"num_examples": (8, 16), "width": (64, 128), "num_layers": (1, 2), "rank": (4, 8)},
    step_width=64, step_layers=1, step_ranks=(4, 16), step_targets=("q", "all linear"),
)  # fmt: skip


class CalibrationPoint:
    """A job with its model, ready to be timed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.base: Any = random_qwen2(job.num_layers, job.width).eval().requires_grad_(False)
        self.adapted = get_peft_model(deepcopy(self.base), adapter_config("frozencore", rank=job.rank))
        self.ids = random_ids(job.num_examples, SEQUENCE, 24 * job.width).split(ROWS)

    def counts(self) -> dict[str, int]:
        """Operations, bytes and calls of this job."""
        job = self.job
        model = Architecture(job.width, 11 * job.width // 4, job.num_layers, 8, 2, 24 * job.width, job.width // 8)
        targets, num_tokens = model.targets(), job.num_examples * SEQUENCE
        svds = {True: 0, False: 0}
        for shape in targets:
            svds[uses_krylov(shape, job.rank)] += svd_operations(shape, job.rank)
        return {
            "num_targets": len(targets),
            "num_batches": len(self.ids),
            "pass_operations": pass_operations(model, num_tokens, SEQUENCE, job.num_examples * COMPLETION),
            "block_activations": num_tokens * job.num_layers * (model.width + model.intermediate),
            "product_operations": product_operations(targets, num_tokens),
            "product_bytes": product_bytes(targets, len(self.ids)),
            "krylov_operations": svds[True],
            "gram_operations": svds[False],
        }

    def warm_up(self) -> None:
        self.floor(1)
        calibrate(self.adapted, [labelled_batch(self.ids[0])], progress=False)

    def floor(self, num_batches: int | None = None) -> None:
        plain_passes(self.base, map(completion_batch, self.ids[:num_batches]))

    def round(self) -> dict[str, float]:
        """Seconds of the floor, of the pass that collects moments, and of the bases."""
        floor_s, batches = cpu_s(self.floor), [labelled_batch(ids) for ids in self.ids]
        marks = {"start": time.process_time()}
        calibrate(self.adapted, batches, progress=lambda stage, *_: marks.update({stage: time.process_time()}))
        end = time.process_time()
        return {
            "floor_s": floor_s,
            "collect_s": marks["calibration"] - marks["start"],
            "build_s": end - marks["calibration"],
        }


class StepPoint:
    """A floor, LoRA and frozen cores on one model."""

    def __init__(self, job: StepJob, base: Any) -> None:
        self.job = job
        self.batch = completion_batch(random_ids(1, STEP_TOKENS, base.config.vocab_size))
        named = {FLOOR: FLOOR, "lora": "lora", "frozencore": UNCALIBRATED}
        modules = TARGET_SETS[job.targets]
        self.steppers = {who: Stepper(with_adapter(base, name, modules, job.rank)) for who, name in named.items()}
        ends = tuple(f".{name}" for name in modules)
        self.shapes = [(m.out_features, m.in_features) for name, m in base.named_modules() if name.endswith(ends)]

    def counts(self) -> dict[str, int]:
        return {
            "num_targets": len(self.shapes),
            "core_operations": core_operations(self.shapes, self.job.rank, STEP_TOKENS),
            "lora_operations": lora_operations(self.shapes, self.job.rank, STEP_TOKENS),
        }

    def warm_up(self) -> None:
        self.round()

    def round(self) -> dict[str, float]:
        return {f"{who}_s": cpu_s(lambda s=stepper: s.step(self.batch)) for who, stepper in self.steppers.items()}


def measure(points: Sequence[CalibrationPoint] | Sequence[StepPoint], num_runs: int) -> list[dict[str, Any]]:
    """All points in turn, the order turned round every other time."""
    runs: list[list[dict[str, float]]] = [[] for _ in points]
    for point in points:
        point.warm_up()
    for number in range(num_runs):
        for index in list(range(len(points)))[:: -1 if number % 2 else 1]:
            runs[index].append(points[index].round())
    return [
        asdict(point.job) | {name: median(run[name] for run in own) for name in own[0]} | point.counts() | {"runs": own}
        for point, own in zip(points, runs, strict=True)
    ]


def machine_rates(size: int) -> dict[str, float]:
    """The best rates of one thread: a square float32 product, and a copy of 64 times as many bytes as one side."""
    A, B = torch.randn(2, size, size)
    C = torch.empty(64 * size * size)
    D = torch.empty_like(C)
    product_s, copy_s = (
        min(cpu_s(run) for _ in range(6)) for run in (lambda: nn.functional.linear(A, B), lambda: D.copy_(C))
    )
    return {"matmul_operations_per_s": 2 * size**3 / product_s, "copy_bytes_per_s": 2 * C.nbytes / copy_s}


def main() -> None:
    parser = parser_of(__doc__, "growth")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-runs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first_load = load_average()

    plan = QUICK if options.quick else FULL
    num_runs, num_step_runs = (1, 1) if options.quick else (options.runs, options.step_runs)
    rates = machine_rates(128 if options.quick else 1024)
    calibration = measure([CalibrationPoint(job) for job in plan.jobs()], num_runs)
    base = random_qwen2(plan.step_layers, plan.step_width)
    step = measure([StepPoint(job, base) for job in plan.step_jobs()], num_step_runs)
    found = {"plan": asdict(plan), "calibration": calibration, "step": step}
    print("\n".join(cost_tables.growth_blocks(found).values()))
    write_found(
        options, runs=num_runs, step_runs=num_step_runs, tokens_per_example=SEQUENCE,
        completion_tokens=COMPLETION, rows_per_batch=ROWS, step_tokens=STEP_TOKENS, processor=processor(),
        num_cores=os.cpu_count(), load_average=[first_load, load_average()], rates=rates,
        constants=fit_constants(calibration, step), **found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
