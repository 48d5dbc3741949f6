"""What benchmarks/gpu.py measures on one model: steps, calibration, initialisations and peak memory, one at a time.

A contestant's adapter is put on, measured, and taken off again, so that the peak is its own and one copy of the weights
is enough. Times are wall seconds with the device idle before and after.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from torch import Tensor, nn

from frozencore import FrozenCoreConfig, calibrate
from frozencore.tune.run.accounting import values_at_once

RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RACERS = ("floor", "lora", "dora", "pissa", "frozencore")
UNCALIBRATED = "frozencore, random bases"  # a step costs the same on any basis
WARM_UP = 3
Batch = dict[str, Tensor]


class OutOfTimeError(Exception):
    """The time budget has run out in the middle of a measurement."""


class Deadline:
    """When to stop."""

    def __init__(self, budget_s: float) -> None:
        self.end = time.perf_counter() + budget_s

    @property
    def left_s(self) -> float:
        return self.end - time.perf_counter()


@dataclass(frozen=True)
class Job:
    """Sizes of what is measured: rows x tokens.

    Attributes:
        long: Tokens of the single-row step.
        short: Tokens of a row in the step with accumulation, and in calibration: about those of an SVAMP prompt.
        rows: Examples in a calibration batch.
        repeats, accumulated_repeats: Steps timed in a round.
        compiled_blocks: Of the model whose steps are compiled: compiling takes time by the block.
        trained_tenants: That train at once, at one row of ``short`` tokens each; ``tenant_steps`` of each.
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
    """A frozen model on its device, the job and the deadline."""

    base: nn.Module
    job: Job
    deadline: Deadline

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    def batches(self, number: int, rows: int, tokens: int, *, shifted: bool) -> list[Batch]:
        """Random tokens, the last quarter of each row completion; ``shifted`` asks the model for no other logits."""
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(number):
            ids = torch.randint(self.base.config.vocab_size, (rows, tokens), generator=generator).to(self.device)
            kept = torch.arange(3 * tokens // 4 - 1, tokens - 1, device=self.device)
            if shifted:
                targets = ids[:, kept + 1]
                batch = {"input_ids": ids, "logits_to_keep": kept, "labels": targets, "shift_labels": targets}
            else:
                labels = ids.clone()
                labels[:, : 3 * tokens // 4] = -100
                batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
            found.append(batch)
        return found

    def calibration_batches(self, *, shifted: bool = False) -> list[Batch]:
        return self.batches(self.job.examples // self.job.rows, self.job.rows, self.job.short, shifted=shifted)


def timed(device: torch.device, run: Callable[[], Any]) -> float:
    """Wall seconds until the device is idle again."""
    synchronise(device)
    started = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def peak_memory(device: torch.device, found: dict[str, Any], name: str) -> Iterator[None]:
    """The most that was allocated meanwhile, whole; None on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield
    found[name] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peft_config(contestant: str, **options: Any) -> Any:
    """PiSSA by its fast SVD: the full one is timed by :func:`full_pissa`."""
    if contestant.startswith("frozencore"):
        constructor = "random" if contestant == UNCALIBRATED else "fcca"
        return FrozenCoreConfig(r=RANK, target_modules=TARGETS, constructor=constructor, task_type="CAUSAL_LM")
    initialisation = {"pissa": "pissa_niter_4", "pissa, full SVD": "pissa", "eva": "eva"}.get(contestant, True)
    return LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=initialisation,
        use_dora=contestant == "dora", task_type="CAUSAL_LM", **options,
    )  # fmt: skip


@contextmanager
def adapted(bench: Bench, contestant: str, **options: Any) -> Iterator[nn.Module]:
    """The base with a contestant's adapter, off again afterwards. PiSSA leaves other random weights behind."""
    if contestant == "floor":
        bench.base.enable_input_require_grads()
        try:
            yield bench.base.train()
        finally:
            bench.base.disable_input_require_grads()
        return
    model = get_peft_model(bench.base, peft_config(contestant, **options))
    try:
        yield model.train()
    finally:
        model.unload()
        bench.base.requires_grad_(False)
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


class Stepper:
    """A model with fused AdamW on what it trains; a step is forward and backward of each batch, clipping, update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True) if self.trained else None

    def accumulate(self, batches: list[Batch]) -> None:
        for batch in batches:
            (self.model(**batch).loss / len(batches)).backward()

    def update(self, *, keep_buffers: bool = False) -> None:
        if self.optimizer is not None:
            nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not keep_buffers)

    def step(self, batches: list[Batch]) -> None:
        self.accumulate(batches)
        self.update()


def race(bench: Bench) -> dict[str, Any]:
    """Rounds over all racers, the second in reverse; each with its set-up, both kinds of step and its peaks."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in RACERS}
    for round_ in range(bench.job.rounds):
        for name in RACERS[:: -1 if round_ % 2 else 1]:
            if bench.deadline.left_s < 0:
                break
            rows[name].append(_race_once(bench, name))
    return {name: summary(runs) for name, runs in rows.items() if runs}


def _race_once(bench: Bench, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    job, device = bench.job, bench.device
    one = bench.batches(1, 1, job.long, shifted=True)
    several = bench.batches(job.accumulation, 1, job.short, shifted=True)
    started = time.perf_counter()
    with adapted(bench, name) as model:
        synchronise(device)
        found["attach_s"] = time.perf_counter() - started
        if name in ("floor", "frozencore"):
            _calibrate(bench, model, name, 1)
            with peak_memory(device, found, "calibration_peak_bytes"):
                found |= _calibrate(bench, model, name, job.examples // job.rows)
        model.train()
        stepper = Stepper(model)
        found["num_trainable"] = values_at_once(model)
        for kind, batches, repeats in (("step", one, job.repeats), ("accumulated", several, job.accumulated_repeats)):
            for _ in range(WARM_UP if kind == "step" else 1):
                stepper.step(batches)
            with peak_memory(device, found, f"{kind}_peak_bytes"):
                times = [timed(device, lambda batches=batches: stepper.step(batches)) for _ in range(repeats)]
            found[f"{kind}_s"] = median(times)
    return found


def kernels(bench: Bench) -> dict[str, Any]:
    """Kernels in a step of one long row, and how long the device is busy with them: the rest of a step is launching.

    To be run last of all: a process that has been profiled launches kernels more slowly from then on.
    """
    if bench.device.type != "cuda":
        return {"skipped": "kernels run on a CUDA device"}
    batches = bench.batches(1, 1, bench.job.long, shifted=True)
    found: dict[str, Any] = {}
    for name in RACERS:
        with adapted(bench, UNCALIBRATED if name == "frozencore" else name) as model:
            stepper = Stepper(model.train())
            for _ in range(WARM_UP):
                stepper.step(batches)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                timed(bench.device, lambda stepper=stepper: stepper.step(batches))
        ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found[name] = {"kernels": len(ran), "busy_s": sum(event.time_range.elapsed_us() for event in ran) / 1e6}
    return found


def _calibrate(bench: Bench, model: nn.Module, name: str, num_batches: int) -> dict[str, float]:
    """Ours, or the floor: a plain forward and backward pass over the same examples."""
    found: dict[str, float] = {}

    def ours() -> None:
        calibration = calibrate(model, bench.calibration_batches()[:num_batches], progress=False)
        found.update(calibration_collect_s=calibration.collect_s, calibration_build_s=calibration.build_s)

    def plain() -> None:
        model.eval()
        for batch in bench.calibration_batches(shifted=True)[:num_batches]:
            model(**batch).loss.backward()

    found["calibration_s"] = timed(bench.device, ours if name == "frozencore" else plain)
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of times, the largest of all else, and the runs."""
    found: dict[str, Any] = {"num_runs": len(runs)}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if name.endswith("_s"):
            found[name] = median(values)
        else:
            found[name] = None if values[0] is None else max(values)
    return found | {"runs": runs}


def full_pissa(bench: Bench) -> dict[str, Any]:
    """PiSSA's own initialisation, a full SVD a weight: what the first block takes beyond LoRA's, times the blocks."""
    num_blocks = bench.base.config.num_hidden_layers
    plain_s, one_s = (_attach_s(bench, name) for name in ("lora", "pissa, full SVD"))
    return {"one_block_s": one_s - plain_s, "num_blocks": num_blocks, "init_s": (one_s - plain_s) * num_blocks}


def _attach_s(bench: Bench, contestant: str) -> float:
    synchronise(bench.device)
    started = time.perf_counter()
    with adapted(bench, contestant, layers_to_transform=[0]):
        synchronise(bench.device)
        return time.perf_counter() - started


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the middle of whatever Python is doing then: a batch of EVA's can take minutes."""

    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def eva(bench: Bench, limit_s: float) -> dict[str, Any]:
    """PEFT's EVA initialisation of the same targets, which reads batches until it converges; its steps are LoRA's."""
    found: dict[str, Any] = {"limit_s": limit_s, "converged": True}

    def initialise(model: nn.Module) -> None:
        batches: Any = bench.calibration_batches()
        try:
            with at_most(min(limit_s, bench.deadline.left_s)):
                initialize_lora_eva_weights(model, batches, show_progress_bar=False)
        except OutOfTimeError:
            found["converged"] = False

    with (
        adapted(bench, "eva", eva_config=EvaConfig()) as model,
        peak_memory(bench.device, found, "init_peak_bytes"),
    ):
        found["init_s"] = timed(bench.device, lambda: initialise(model))
    return found
