"""The sections of benchmarks/gpu.py on one model: steps, calibration and peaks, one function each.

A contestant's adapter is put on, measured, and taken off again, so that the peak is its own and one copy of the weights
is enough. Times are wall seconds with the device idle before and after.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn

from contestants import (
    CONTESTANTS,
    FLOOR,
    UNCALIBRATED,
    Batch,
    Stepper,
    adapter_config,
    completion_batch,
    labelled_batch,
    random_ids,
)
from frozencore import calibrate
from frozencore.tune.run.costs import values_at_once
from harness import synchronise, wall_s

WITHOUT_PISSA = {FLOOR: FLOOR, "frozencore": UNCALIBRATED, "lora": "lora", "dora": "dora"}
WARM_UP = 3
Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Sizes of what is measured: rows x tokens.

    Attributes:
        long: Tokens of the single-row step.
        short: Tokens of a row in the step with accumulation, and in calibration: about those of an SVAMP prompt.
        rows: Examples in a calibration batch.
        repeats, accumulated_repeats: Steps timed in a round.
        compiled_blocks: Blocks of the model whose steps are compiled: compiling takes time by the block.
        trained_tenants: How many train at once, at one row of ``short`` tokens each; ``tenant_steps`` of each.
        served_tenants: Rows of one batch, each of another tenant.
    """

    long: int = 512
    short: int = 128
    accumulation: int = 8
    examples: int = 128
    rows: int = 8
    repeats: int = 10
    accumulated_repeats: int = 3
    rounds: int = 2
    compiled_blocks: int = 6
    trained_tenants: tuple[int, ...] = (32, 128)
    tenant_steps: int = 4
    served_tenants: int = 64


TINY = Job(
    long=16, short=8, accumulation=2, examples=16, rows=8, repeats=1, accumulated_repeats=1, rounds=1,
    compiled_blocks=1, trained_tenants=(2, 3), tenant_steps=1, served_tenants=2,
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A frozen model on its device and the job; ``text`` holds token ids of a real text, random ones without it."""

    base: Any
    job: Job
    text: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    def ids(self, rows: int, tokens: int) -> Tensor:
        """Rows of so many tokens, from the beginning of the text over and over."""
        if self.text is None:
            return random_ids(rows, tokens, self.base.config.vocab_size).to(self.device)
        return self.text.repeat(-(-rows * tokens // len(self.text)))[: rows * tokens].view(rows, tokens).to(self.device)

    @contextmanager
    def adapted(self, contestant: str) -> Iterator[Any]:
        """The base with a contestant's adapter, off again afterwards. PiSSA leaves other weights behind."""
        if contestant == FLOOR:
            self.base.enable_input_require_grads()
            try:
                yield self.base.train()
            finally:
                self.base.disable_input_require_grads()
            return
        model = get_peft_model(self.base, adapter_config(contestant))
        try:
            yield model.train()
        finally:
            model.unload()
            self.base.requires_grad_(False)
            free_memory()


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def peak_memory(found: Found, name: str) -> Iterator[None]:
    """The most that was allocated meanwhile; None on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    found[name] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def repeated(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds, after one run that is not timed."""
    run()
    return median(wall_s(run) for _ in range(repeats))


def race(bench: Bench) -> Found:
    """Rounds over all contestants, the second in reverse; each with calibration, both kinds of step and its peaks."""
    rows: dict[str, list[Found]] = {name: [] for name in CONTESTANTS}
    for number in range(bench.job.rounds):
        for name in CONTESTANTS[:: -1 if number % 2 else 1]:
            rows[name].append(_race_once(bench, name))
    return {name: summary(runs) for name, runs in rows.items()}


def _race_once(bench: Bench, name: str) -> Found:
    found: Found = {}
    job = bench.job
    several = [completion_batch(row[None]) for row in bench.ids(job.accumulation, job.short)]
    started = time.perf_counter()
    with bench.adapted(name) as model:
        synchronise()
        found["attach_s"] = time.perf_counter() - started
        if name in (FLOOR, "frozencore"):
            _calibrate(bench, model, name, 1)
            with peak_memory(found, "calibration_peak_bytes"):
                found |= _calibrate(bench, model, name, job.examples // job.rows)
        stepper = Stepper(model.train())
        found["num_trainable"] = values_at_once(model)
        for kind, batches, repeats in (
            ("step", [completion_batch(bench.ids(1, job.long))], job.repeats),
            ("accumulated", several, job.accumulated_repeats),
        ):
            for _ in range(WARM_UP if kind == "step" else 1):
                stepper.step(*batches)
            with peak_memory(found, f"{kind}_peak_bytes"):
                found[f"{kind}_s"] = median(wall_s(lambda b=batches: stepper.step(*b)) for _ in range(repeats))
    return found


def _calibrate(bench: Bench, model: nn.Module, name: str, num_batches: int) -> dict[str, float]:
    """Our calibration, or the floor: a plain forward and backward pass over the same examples, of the same logits."""
    found: dict[str, float] = {}
    rows = bench.ids(num_batches * bench.job.rows, bench.job.short).split(bench.job.rows)

    def ours() -> None:
        calibration = calibrate(model, [labelled_batch(ids) for ids in rows], progress=False)
        found.update(calibration_collect_s=calibration.collect_s, calibration_build_s=calibration.build_s)

    def plain() -> None:
        model.eval()
        for ids in rows:
            model(**completion_batch(ids)).loss.backward()

    found["calibration_s"] = wall_s(ours if name == "frozencore" else plain)
    return found


def summary(runs: list[Found]) -> Found:
    """Medians of times, the largest of all else, and the runs."""
    found: Found = {"num_runs": len(runs)}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if name.endswith("_s"):
            found[name] = median(values)
        else:
            found[name] = None if values[0] is None else max(values)
    return found | {"runs": runs}


def compiled_steps(bench: Bench) -> Found:
    """Steps of one long row, with a model of a few blocks compiled; the first step holds the compilation."""

    def prepare(model: nn.Module, batch: Batch) -> Callable[[], None]:
        stepper = Stepper(model)
        stepper.model = torch.compile(model, backend="inductor" if bench.device.type == "cuda" else "eager")
        return lambda: stepper.step(batch)

    base = bench.base
    whole, number = base.model.layers, bench.job.compiled_blocks
    base.model.layers = whole[:number]
    base.config.num_hidden_layers = len(base.model.layers)
    try:
        return {"blocks": len(base.model.layers)} | _prepared_steps(bench, prepare)
    finally:
        base.model.layers = whole
        base.config.num_hidden_layers = len(whole)


def graphed_steps(bench: Bench) -> Found:
    """Forward and backward of one long row captured once and replayed; clipping and update stay outside."""
    if bench.device.type != "cuda":
        return {"skipped": "CUDA graphs need a CUDA device"}

    def prepare(model: nn.Module, batch: Batch) -> Callable[[], None]:
        stepper = Stepper(model)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                stepper.accumulate(batch)
                stepper.update(keep_buffers=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stepper.accumulate(batch)

        def step() -> None:
            graph.replay()
            stepper.update(keep_buffers=True)

        return step

    return _prepared_steps(bench, prepare)


def _prepared_steps(bench: Bench, prepare: Callable[[nn.Module, Batch], Callable[[], None]]) -> Found:
    """Seconds of preparation with the first step, and the median of the later ones, of each contestant."""
    batch, found = completion_batch(bench.ids(1, bench.job.long)), {}
    for name, contestant in WITHOUT_PISSA.items():
        with bench.adapted(contestant) as model:
            steps: list[Callable[[], None]] = []
            first_s = wall_s(lambda model=model, steps=steps: (steps.append(prepare(model, batch)), steps[0]()))
            for _ in range(WARM_UP):
                steps[0]()
            found[name] = {"first_s": first_s, "step_s": median(wall_s(steps[0]) for _ in range(bench.job.repeats))}
            steps.clear()  # a graph holds memory of the model
        torch.compiler.reset()
    return found


def kernels(bench: Bench) -> Found:
    """Kernels in a step of one long row, and how long the device is busy with them: the rest of a step is launching.

    To be run last: a process that has been profiled launches kernels more slowly from then on.
    """
    if bench.device.type != "cuda":
        return {"skipped": "kernels run on a CUDA device"}
    batch, found = completion_batch(bench.ids(1, bench.job.long)), {}
    for name, contestant in WITHOUT_PISSA.items():
        with bench.adapted(contestant) as model:
            stepper = Stepper(model)
            for _ in range(WARM_UP):
                stepper.step(batch)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                wall_s(lambda s=stepper: s.step(batch))
        ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found[name] = {"kernels": len(ran), "busy_s": sum(event.time_range.elapsed_us() for event in ran) / 1e6}
    return found
