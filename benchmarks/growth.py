"""How cost grows: calibration against examples, width, layers and rank; a training step against rank and targets.

    python benchmarks/growth.py            # about four minutes;  --quick: one tiny round that only shows that it runs

Seconds of CPU on one thread. In a round every point of every sweep runs once, beside its floor: a plain forward and
backward pass over the same batches, gradients passed through every layer, logits at completion positions only. The
points are random models of the Qwen2 family, eight examples of 64 tokens a batch, the last quarter completion; q, k, v
and o are calibrated with ``fcca``. Steps are those of benchmarks/step.py, on one row of 256 tokens.

Beside the medians stand the rates of this machine (a float32 matrix product, a copy), and constants fitted to all
points: seconds per operation and per call, with the operations counted by benchmarks/operations.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fitting import fit_constants
from frozencore.files.whole_file import write_json
from frozencore.tune.run.provenance import provenance
from growth_points import (
    COMPLETION,
    ROWS,
    SEQUENCE,
    STEP_TOKENS,
    TARGET_SETS,
    CalibrationPoint,
    Job,
    StepJob,
    StepPoint,
)
from machine import load_average, processor
from step import timed, wide_model


@dataclass(frozen=True)
class Plan:
    """What is varied, one letter at a time, around the first job."""

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


def measure(points: Sequence[CalibrationPoint] | Sequence[StepPoint], num_runs: int) -> list[dict[str, Any]]:
    """All points in turn, the order turned round every other time."""
    runs: list[list[dict[str, float]]] = [[] for _ in points]
    for point in points:
        point.warm_up()
    for round_ in range(num_runs):
        for index in list(range(len(points)))[:: -1 if round_ % 2 else 1]:
            runs[index].append(points[index].round())
    return [
        asdict(point.job) | {name: median(run[name] for run in own) for name in own[0]} | point.counts() | {"runs": own}
        for point, own in zip(points, runs, strict=True)
    ]


def machine_rates(size: int, num_runs: int = 5) -> dict[str, float]:
    """What one thread can do at best: a square float32 product, and a copy of 64 times as many bytes as one side."""

    def best(run: Callable[[], Any]) -> float:
        run()
        return min(timed(run) for _ in range(num_runs))

    A, B = torch.randn(2, size, size)
    C: Tensor = torch.empty(64 * size * size)
    D = torch.empty_like(C)
    return {
        "matmul_operations_per_s": 2 * size**3 / best(lambda: A @ B),
        "copy_bytes_per_s": 2 * C.nbytes / best(lambda: D.copy_(C)),
    }


def show(title: str, rows: list[dict[str, Any]], letters: Sequence[str]) -> None:
    table = Table(*letters, *(name for name in rows[0] if name.endswith("_s")), title=title)
    for row in rows:
        table.add_row(*(str(row[name]) for name in letters), *(f"{v:.3g}" for k, v in row.items() if k.endswith("_s")))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Tiny models, one run each; its times mean nothing.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "growth.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loads = [load_average()]

    plan = QUICK if options.quick else FULL
    num_runs, num_step_runs = (1, 1) if options.quick else (options.runs, options.step_runs)
    rates = machine_rates(128 if options.quick else 1024)
    calibration = measure([CalibrationPoint(job) for job in plan.jobs()], num_runs)
    show("calibration", calibration, list(asdict(plan.job)))
    base = wide_model(plan.step_layers, plan.step_width)
    step = measure([StepPoint(job, base) for job in plan.step_jobs()], num_step_runs)
    show("step", step, ["targets", "rank"])
    constants = fit_constants(calibration, step)
    setting = {
        "quick": options.quick, "runs": num_runs, "step_runs": num_step_runs, "cpus": sorted(os.sched_getaffinity(0)),
        "plan": asdict(plan), "tokens_per_example": SEQUENCE, "completion_tokens": COMPLETION, "rows_per_batch": ROWS,
        "step_tokens": STEP_TOKENS, "processor": processor(), "num_cores": os.cpu_count(),
        "load_average": [*loads, load_average()],
    }  # fmt: skip
    found = {"rates": rates, "constants": constants, "calibration": calibration, "step": step}
    write_json(options.out, {"benchmark": "growth", **setting, **found, "provenance": provenance()})


if __name__ == "__main__":
    main()
