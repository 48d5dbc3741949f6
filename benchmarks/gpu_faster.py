"""The step as one compiled graph, and as one CUDA graph: what launching kernels one by one costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from gpu_contest import UNCALIBRATED, WARM_UP, Batch, Bench, Stepper, adapted, timed

CONTESTANTS = {"floor": "floor", "frozencore": UNCALIBRATED, "lora": "lora", "dora": "dora"}


def compiled_steps(bench: Bench) -> dict[str, Any]:
    """Steps of one long row, with a model of few of the blocks compiled; the first step, compilation included."""

    def prepare(model: nn.Module, batch: Batch) -> Callable[[], None]:
        compiled = torch.compile(model, backend="inductor" if bench.device.type == "cuda" else "eager")
        stepper = Stepper(model)
        stepper.model = compiled
        return lambda: stepper.step([batch])

    with few_blocks(bench.base, bench.job.compiled_blocks) as num_blocks:
        return {"blocks": num_blocks} | _each(bench, prepare)


@contextmanager
def few_blocks(base: Any, number: int) -> Iterator[int]:
    """The model without its last blocks, meanwhile; how many it has then."""
    whole = base.model.layers
    base.model.layers = whole[:number]
    base.config.num_hidden_layers = len(base.model.layers)
    try:
        yield len(base.model.layers)
    finally:
        base.model.layers = whole
        base.config.num_hidden_layers = len(whole)


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
        if bench.deadline.left_s < 0:
            break
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
