"""Steps, calibration, tenants and peak memory on one GPU, at the shapes of real models and on SmolLM2.

    python benchmarks/gpu.py                      # about eight minutes; --smollm2 FOLDER adds the real model
    python benchmarks/gpu.py --tiny               # on a CPU in seconds, nothing compiled: does it run?
    python benchmarks/gpu.py --sections graphs    # these alone

Qwen2.5-1.5B and 3B (7B if asked) have random weights; SmolLM2 its own, and rows of real text where there is a
``--data-root``. bfloat16, rank 16 on q, k, v and o, no checkpointing. The contestants are the floor without adapter,
PEFT's LoRA, DoRA and PiSSA, and frozen cores. A step is of one row of 512 tokens, or of eight rows of 128 accumulated,
the paper's batch at about the length of an SVAMP prompt. Calibration reads 128 examples of 128 tokens.

The most important sections come first, on every model: the step replayed from a CUDA graph, without the time of kernel
launches; compiled steps of a few blocks; eager steps with calibration and peaks; a batch of 64 tenants; 32 tenants and
more trained at once; the kernels of a step. A failed section is recorded with its error and the others continue. The
file is written after every section, and a section in it is not measured again, so the same command resumes. A section
that is expected to end after ``--budget`` is not started.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from contestants import (
    CONTESTANTS,
    FLOOR,
    LABELS,
    RANK,
    UNCALIBRATED,
    Architecture,
    Batch,
    Stepper,
    adapter_config,
    completion_batch,
    labelled_batch,
    random_ids,
    random_model,
)
from frozencore import CoreBank, calibrate, frozen_core_layers
from frozencore.files.whole_file import write_json
from frozencore.tune.cost import values_at_once
from frozencore.tune.many.tenant import Tenant
from frozencore.tune.many.train import train_many
from frozencore.tune.provenance import provenance
from frozencore.tune.rows import TokenRow
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import evaluation_rows
from frozencore.tune.training.recipe import Recipe
from harness import RESULTS, synchronise, table, wall_s

PROMPT_TOKENS, NEW_TOKENS = 32, 32
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


def trained_together(bench: Bench) -> Found:
    """Seconds of a tenant's step at one row, of many tenants at once and of one alone in a bare loop; peaks."""
    job, row = bench.job, completion_batch(bench.ids(1, bench.job.short))
    found: Found = {"rows_a_step": 1, "tokens": job.short}
    with bench.adapted(FLOOR) as model:
        batches = {count: completion_batch(bench.ids(count, job.short)) for count in job.trained_tenants}
        found[FLOOR] = {
            f"{count} together": repeated(lambda b=b: model(**b).loss.backward(), job.repeats) / count
            for count, b in batches.items()
        }
    for name, contestant in (("frozencore alone", UNCALIBRATED), ("LoRA alone", "lora")):
        with bench.adapted(contestant) as model:
            stepper = Stepper(model)
            stepper.step(row)
            found[name] = {"tenant_step_s": repeated(lambda s=stepper: s.step(row), job.repeats)}
    for count in job.trained_tenants:
        with bench.adapted(UNCALIBRATED) as model:
            train_many(model, _tenants(bench, count, 1), pad_id=0, num_slots=count)
            one: Found = {}
            with peak_memory(one, "peak_bytes"):
                work = _tenants(bench, count, job.tenant_steps)
                all_s = wall_s(lambda m=model, w=work, n=count: train_many(m, w, pad_id=0, num_slots=n))
            found[f"{count} together"] = one | {"tenant_step_s": all_s / count / job.tenant_steps}
    return found


def _tenants(bench: Bench, count: int, num_steps: int) -> dict[str, Tenant]:
    length = bench.job.short
    recipe = Recipe(learning_rate=1e-3, warmup=0.1, batch_size=1, accumulation=1)
    ids = bench.ids(count * num_steps, length).view(count, num_steps, length).tolist()
    rows = [[TokenRow(f"{i}", one, 3 * length // 4) for i, one in enumerate(own)] for own in ids]
    return {f"tenant {i}": Tenant(own, recipe) for i, own in enumerate(rows)}


def one_batch(bench: Bench) -> Found:
    """A row for each tenant, forward and generated: the base model, and a bank of cores."""
    ids = bench.ids(bench.job.served_tenants, min(PROMPT_TOKENS, bench.job.short))
    found: Found = {"tenants": len(ids), "base": _forward_and_generate(bench, bench.base.eval(), ids, nullcontext)}
    names = [f"t{i}" for i in range(len(ids))]
    with bench.adapted(UNCALIBRATED) as model:
        bank = CoreBank(model.eval(), len(ids))
        for name in names:
            layers = frozen_core_layers(model, "default")
            bank.put(name, {key: 0.02 * torch.randn_like(layer.factors("default")[2]) for key, layer in layers.items()})
        found["bank of cores"] = _forward_and_generate(bench, model, ids, lambda: bank.rows(names))
    return found


@torch.no_grad()
def _forward_and_generate(
    bench: Bench, model: Any, ids: Tensor, around: Callable[[], AbstractContextManager[None]]
) -> Found:
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    new = min(NEW_TOKENS, bench.job.short)
    tokens = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def forward() -> None:
        with around():
            model(**rows)

    def generate() -> None:
        with around():
            model.generate(**rows, **tokens)

    return {"forward_s": repeated(forward, bench.job.repeats), "generate_s": repeated(generate, 2)}


SMOLLM2 = "SmolLM2-135M"
SHAPES = {
    "Qwen2.5-1.5B": Architecture(1536, 8960, 28, 12, 2, 151936, 128),
    "Qwen2.5-3B": Architecture(2048, 11008, 36, 16, 2, 151936, 128),
    "Qwen2.5-7B": Architecture(3584, 18944, 28, 28, 4, 152064, 128),
}
DEFAULT = (SMOLLM2, "Qwen2.5-1.5B", "Qwen2.5-3B")
TINY_SIZES = Architecture(64, 128, 2, 4, 2, 256, 16)


@dataclass(frozen=True)
class Section:
    """A measurement, and the seconds that it is expected to take on one model."""

    measure: Callable[[Bench], dict[str, Any]]
    expected_s: float


SECTIONS = {  # the most important first
    "graphs": Section(graphed_steps, 12),
    "compile": Section(compiled_steps, 60),
    "race": Section(race, 45),
    "one batch": Section(one_batch, 25),
    "trained together": Section(trained_together, 40),
    "kernels": Section(kernels, 8),
}
PAGE_NAMES = {"graphs": "CUDA graphs"}  # under which the page and earlier files know a section


def plan(models: list[str], sections: list[str]) -> list[tuple[str, str]]:
    """Models and sections in the order of their worth: steps and calibration of every model before any tenants."""
    steps, tenants = (
        [name for name in sections if name in some]
        for some in (("graphs", "compile", "race"), ("one batch", "trained together"))
    )
    order = [(model, section) for part in (steps, tenants) for model in models for section in part]
    return order + [(model, "kernels") for model in models if "kernels" in sections]


def text_ids(folder: Path, data_root: Path) -> Tensor:
    """Token ids of the evaluation rows of SST-2, end to end."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = evaluation_rows(find_task("sst2"), data_root, num_evaluation=500)
    return torch.tensor(
        tokenizer("\n\n".join(f"{row.prompt}{row.completion}" for row in rows), verbose=False)["input_ids"]
    )


@dataclass(frozen=True)
class Stage:
    """Where models run and come from."""

    device: str
    job: Job
    smollm2: Path | None
    data_root: Path | None
    tiny: bool

    def bench(self, name: str) -> Bench:
        if name == SMOLLM2:
            assert self.smollm2 is not None
            model = AutoModelForCausalLM.from_pretrained(self.smollm2, dtype=torch.bfloat16, use_cache=False)
            text = text_ids(self.smollm2, self.data_root) if self.data_root else None
            return Bench(model.to(self.device).requires_grad_(False), self.job, text)
        sizes = TINY_SIZES if self.tiny else SHAPES[name]
        return Bench(random_model(sizes, self.device), self.job)


class Report:
    """The results so far, in a file that is complete at any time; an existing file is continued."""

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self.path = path
        self.started = time.perf_counter()
        known = json.loads(path.read_text()) if path is not None and path.exists() else {"models": {}, "used_s": 0.0}
        if known.get("device", setting["device"]) != setting["device"]:
            raise SystemExit(f"{path} was measured on {known['device']}, this is {setting['device']}. Name another.")
        self.before_s = known["used_s"]
        self.content = {"benchmark": "gpu", **setting, "provenance": provenance(), "models": known["models"]}

    def has(self, model: str, section: str) -> bool:
        found = self.content["models"].get(model, {}).get(PAGE_NAMES.get(section, section), {"error": ""})
        return "error" not in found

    def add(self, model: str, section: str, found: dict[str, Any]) -> None:
        self.content["models"].setdefault(model, {})[PAGE_NAMES.get(section, section)] = found
        self.content["used_s"] = self.before_s + time.perf_counter() - self.started
        if self.path is not None:
            write_json(self.path, self.content)


def left_over(order: list[tuple[str, str]], report: Report) -> Iterator[tuple[str, str]]:
    """The sections that the report does not have yet."""
    return ((model, section) for model, section in order if not report.has(model, section))


def measure(order: list[tuple[str, str]], stage: Stage, budget_s: float, report: Report) -> list[str]:
    """Every section in its own try; what was left for want of time."""
    end, left = time.perf_counter() + budget_s, []
    bench, loaded = None, None
    for model, section in list(left_over(order, report)):
        expected_s = 0.0 if stage.tiny else SECTIONS[section].expected_s
        if time.perf_counter() + expected_s > end:
            left.append(f"{model}, {section}")
            continue
        try:
            if bench is None or loaded != model:
                bench = None
                free_memory()
                bench, loaded = stage.bench(model), model
            started = time.perf_counter()
            found = SECTIONS[section].measure(bench)
            print(f"{model}, {section}: {time.perf_counter() - started:.0f} s", flush=True)
            report.add(model, section, found)
        except Exception as error:  # one that is out of memory must not lose the rest
            print(f"{model}, {section}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            where = traceback.format_exc().splitlines()[-12:]
            report.add(model, section, {"error": f"{type(error).__name__}: {error}"[:500], "traceback": where})
            bench = None  # it may be half adapted
    return left


def table_of(found: Mapping[str, Any]) -> str:
    """Each model's race on a GPU."""
    body = []
    for model, sections in found["models"].items():
        for racer, row in sections.get("race", {}).items():
            start = "" if row.get("calibration_s") is None else f"{row['calibration_s']:.1f}"
            peak = (row["accumulated_peak_bytes"] or 0) / 1e9
            times = [f"{1e3 * row['step_s']:.0f}", f"{row['accumulated_s']:.2f}", f"{peak:.3f}"]
            body.append([model, LABELS[racer], start, *times, f"{row['num_trainable']:,}"])
    heads = ["model", "", "start, s", "1 x 512, ms", "8 x (1 x 128), s", "peak, GB", "trained values"]
    return table(heads, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480, help="Seconds within which all sections must end.")
    parser.add_argument("--models", nargs="+", choices=[SMOLLM2, *SHAPES], default=list(DEFAULT))
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), help="These alone; --tiny compiles nothing.")
    parser.add_argument("--smollm2", type=Path, help="Folder of SmolLM2; it is left out without one.")
    parser.add_argument("--data-root", type=Path, help="Folder of the tasks' data, for SmolLM2's rows.")
    parser.add_argument("--tiny", action="store_true", help="Two narrow layers on the CPU; its times mean nothing.")
    parser.add_argument("--out", type=Path, help="Default: results/gpu.json beside this file; none with --tiny.")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("There is no CUDA device here. --tiny runs all of it on the CPU at a tiny size.")

    warnings.simplefilter("ignore")  # PEFT warns of initialisations that change the base weights
    device, job = ("cpu", TINY) if options.tiny else ("cuda", Job())
    setting = {
        "tiny": options.tiny, "rank": RANK, "job": asdict(job),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip
    out = options.out or (None if options.tiny else RESULTS / "gpu.json")
    report = Report(out, setting)
    sections = options.sections or [name for name in SECTIONS if not (options.tiny and name == "compile")]
    models = [name for name in options.models if name != SMOLLM2 or options.smollm2]
    stage = Stage(device, job, options.smollm2, options.data_root, options.tiny)
    left = measure(plan(models, sections), stage, options.budget, report)
    print(table_of(report.content))
    if left:
        print(f"No time was left for: {'; '.join(left)}. The same command goes on with them.")


if __name__ == "__main__":
    main()
