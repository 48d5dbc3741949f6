"""The step as one compiled graph, and as one CUDA graph: what launching kernels one by one costs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from gpu_contest import UNCALIBRATED, WARM_UP, Batch, Bench, Stepper, adapted, timed

CONTESTANTS = {"floor": "floor", "lora": "lora", "frozencore": UNCALIBRATED}


def compiled_steps(bench: Bench) -> dict[str, Any]:
    """Steps of one long row, with the model compiled; the first step, compilation included, beside them."""

    def prepare(model: nn.Module, batch: Batch) -> Callable[[], None]:
        compiled = torch.compile(model, backend="inductor" if bench.device.type == "cuda" else "eager")
        stepper = Stepper(model)
        stepper.model = compiled
        return lambda: stepper.step([batch])

    return _each(bench, prepare)


def graphed_steps(bench: Bench) -> dict[str, Any]:
    """Forward and backward of one long row captured once and replayed; clipping and update stay outside."""
    if bench.device.type != "cuda":
        return {"skipped": "CUDA graphs need a CUDA device"}

    def prepare(model: nn.Module, batch: Batch) -> Callable[[], None]:
        stepper = Stepper(model)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                stepper.accumulate([batch])
                stepper.update(keep_buffers=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stepper.accumulate([batch])

        def step() -> None:
            graph.replay()
            stepper.update(keep_buffers=True)

        return step

    return _each(bench, prepare)


def _each(bench: Bench, prepare: Callable[[nn.Module, Batch], Callable[[], None]]) -> dict[str, Any]:
    """Preparation and first step, and the median of the later ones, of each contestant."""
    (batch,) = bench.batches(1, 1, bench.job.long, shifted=True)
    found: dict[str, Any] = {}
    for name, contestant in CONTESTANTS.items():
        steps: list[Callable[[], None]] = []
        with adapted(bench, contestant) as model:
            first_s = timed(
                bench.device, lambda model=model, steps=steps: (steps.append(prepare(model, batch)), steps[0]())
            )
            for _ in range(WARM_UP):
                steps[0]()
            times = [timed(bench.device, steps[0]) for _ in range(bench.job.repeats)]
            found[name] = {"first_s": first_s, "step_s": median(times)}
            steps.clear()
        torch.compiler.reset()
    return found
