"""Steps and calibration on one GPU, at the shapes of real models and on SmolLM2.

    python benchmarks/gpu.py                      # about three minutes; --smollm2 FOLDER adds the real model
    python benchmarks/gpu.py --quick              # on a CPU in seconds: does it run?

Qwen2.5-1.5B and 3B (7B if asked) have random weights; SmolLM2 its own, and rows of real text where there is a
``--data-root``. bfloat16, rank 16 on q, k, v and o, no checkpointing. The contestants are the floor without adapter,
PEFT's LoRA, DoRA and PiSSA, and frozen cores. A step is of one row of 512 tokens, or of eight rows of 128 accumulated,
the paper's batch at about the length of an SVAMP prompt. The step of one row is also replayed from a CUDA graph, which
leaves out the launching of kernels. Calibration reads 128 examples of 128 tokens.

A model whose measurement fails is recorded with its error and the others continue. The file is written after every
model, and a model in it is not measured again, so the same command resumes.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from contestants import (
    CONTESTANTS,
    FLOOR,
    LABELS,
    RANK,
    Stepper,
    completion_batch,
    random_ids,
    random_qwen2,
    with_adapter,
)
from frozencore import calibrate
from frozencore.tune.cost import num_trainable
from frozencore_lab.tasks.registry import find_task
from harness import parser_of, results_file, table, wall_s, write_found

WARM_UP = 3
SMOLLM2 = "SmolLM2-135M"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-1.5B": {"num_layers": 28, "width": 1536, "heads": 12, "inner": 8960, "vocabulary": 151936, "tied": True},
    "Qwen2.5-3B": {"num_layers": 36, "width": 2048, "heads": 16, "inner": 11008, "vocabulary": 151936, "tied": True},
    "Qwen2.5-7B": {
        "num_layers": 28, "width": 3584, "heads": 28, "kv_heads": 4, "inner": 18944, "vocabulary": 152064,
    },
}  # fmt: skip
TINY_SHAPE: Mapping[str, Any] = {"num_layers": 2, "width": 64, "heads": 4, "inner": 128, "vocabulary": 256}


@dataclass(frozen=True)
class Job:
    """Sizes of what is measured: rows x tokens.

    Attributes:
        long: Tokens of the single-row step.
        short: Tokens of a row in the step with accumulation, and in calibration: about those of an SVAMP prompt.
        rows: Examples in a calibration batch.
        repeats, accumulated_repeats: Steps timed in a round.
    """

    long: int = 512
    short: int = 128
    accumulation: int = 8
    examples: int = 128
    rows: int = 8
    repeats: int = 10
    accumulated_repeats: int = 3
    rounds: int = 2


TINY = Job(long=16, short=8, accumulation=2, examples=16, rows=8, repeats=1, accumulated_repeats=1, rounds=1)


@dataclass(frozen=True)
class Bench:
    """A frozen model on its device and the job; ``text`` holds token ids of a real text, random ones without it."""

    base: Any
    job: Job
    text: Tensor | None = None

    def ids(self, rows: int, tokens: int) -> Tensor:
        """Rows of so many tokens, from the beginning of the text over and over."""
        device = next(self.base.parameters()).device
        if self.text is None:
            return random_ids(rows, tokens, self.base.config.vocab_size).to(device)
        return self.text.repeat(-(-rows * tokens // len(self.text)))[: rows * tokens].view(rows, tokens).to(device)


def race(bench: Bench) -> dict[str, Any]:
    """Rounds over all contestants, the second in reverse: medians of times, and the runs."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for number in range(bench.job.rounds):
        for name in CONTESTANTS[:: -1 if number % 2 else 1]:
            rows[name].append(race_once(bench, name))
            free_memory()
    return {
        name: {
            "num_runs": len(runs),
            **{what: median([run[what] for run in runs]) for what in runs[0] if what.endswith("_s")},
            "num_trainable": runs[0]["num_trainable"],
            "graph_s": replayed_s(bench, name),
            "runs": runs,
        }
        for name, runs in rows.items()
    }


def race_once(bench: Bench, name: str) -> dict[str, Any]:
    """One contestant's calibration and both kinds of step."""
    found: dict[str, Any] = {}
    job = bench.job
    model = with_adapter(bench.base, name)
    if name in (FLOOR, "frozencore"):
        for num_batches in (1, job.examples // job.rows):  # the first warms up
            found |= calibration_times(bench, model, name, num_batches)
    stepper = Stepper(model.train())
    found["num_trainable"] = num_trainable(model)
    several = [completion_batch(row[None]) for row in bench.ids(job.accumulation, job.short)]
    for kind, batches, warm_up, repeats in (
        ("step", [completion_batch(bench.ids(1, job.long))], WARM_UP, job.repeats),
        ("accumulated", several, 1, job.accumulated_repeats),
    ):
        times = [wall_s(partial(stepper.step, *batches)) for _ in range(warm_up + repeats)]
        found[f"{kind}_s"] = median(times[warm_up:])
    return found


def calibration_times(bench: Bench, model: nn.Module, name: str, num_batches: int) -> dict[str, float]:
    """Our calibration, or the floor: a plain forward and backward pass over the same examples, of the same logits."""
    found: dict[str, float] = {}
    rows = bench.ids(num_batches * bench.job.rows, bench.job.short).split(bench.job.rows)

    def ours() -> None:
        batches = []
        for ids in rows:  # labels for every token, as a data loader gives them; the last quarter is the completion
            labels = ids.clone()
            labels[:, : 3 * ids.shape[1] // 4] = -100
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        calibration = calibrate(model, batches, learning_rate=False, progress=False)
        found.update(calibration_collect_s=calibration.collect_s, calibration_build_s=calibration.build_s)

    def plain() -> None:
        model.eval()
        for ids in rows:
            model(**completion_batch(ids)).loss.backward()

    return {"calibration_s": wall_s(ours if name == "frozencore" else plain), **found}


def replayed_s(bench: Bench, name: str) -> float | None:
    """Seconds of a step whose forward and backward pass is replayed from a CUDA graph; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    batch = completion_batch(bench.ids(1, bench.job.long))
    stepper = Stepper(with_adapter(bench.base, name))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks before a capture
        for _ in range(WARM_UP):
            stepper.step(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # no parameter has a gradient yet, so a replay overwrites the gradients
        stepper.model(**batch).loss.backward()

    def step() -> None:
        graph.replay()
        stepper.update()

    return median(wall_s(step) for _ in range(WARM_UP + bench.job.repeats))


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------- the models


def random_bench(shape: Mapping[str, Any], device: str, job: Job) -> Bench:
    """A model with random weights, made where it will run."""
    with torch.device(device):
        return Bench(random_qwen2(**shape).to(torch.bfloat16).requires_grad_(False), job)


def smollm2_bench(folder: Path, data_root: Path | None, device: str, job: Job) -> Bench:
    """The real model, with the evaluation rows of SST-2 end to end if they are at hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_cache=False)
    text = None
    if data_root is not None:
        rows = find_task("sst2").draw_evaluation(data_root, num_evaluation=500)
        joined = "\n\n".join(f"{row.prompt}{row.completion}" for row in rows)
        text = torch.tensor(AutoTokenizer.from_pretrained(folder)(joined, verbose=False)["input_ids"])
    return Bench(model.to(device).requires_grad_(False), job, text)


def attempted(make: Callable[[], Bench]) -> dict[str, Any]:
    """The measurements of a model, or the error: one that is out of memory must not lose the rest."""
    started = time.perf_counter()
    try:
        found = race(make())
    except Exception as error:
        where = traceback.format_exc().splitlines()[-12:]
        found = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": where}
    print(f"{time.perf_counter() - started:.0f} s {found.get('error', '')}", flush=True)
    free_memory()
    return found


def table_of(found: Mapping[str, Any]) -> str:
    """Each model's race on a GPU, if it did not fail."""
    body = []
    for model, sections in found["models"].items():
        for racer, row in sections["race"].items() if "error" not in sections["race"] else ():
            start = "" if row.get("calibration_s") is None else f"{row['calibration_s']:.1f}"
            graph = "" if row.get("graph_s") is None else f"{1e3 * row['graph_s']:.1f}"
            times = [f"{1e3 * row['step_s']:.0f}", graph, f"{row['accumulated_s']:.2f}"]
            body.append([model, LABELS[racer], start, *times, f"{row['num_trainable']:,}"])
    heads = ["model", "", "start, s", "1 x 512, ms", "from a graph", "8 x (1 x 128), s", "trained values"]
    return table(heads, body)


def main() -> None:
    parser = parser_of(__doc__, "gpu")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["Qwen2.5-1.5B", "Qwen2.5-3B"])
    parser.add_argument("--smollm2", type=Path, help="Folder of SmolLM2; it is left out without one.")
    parser.add_argument("--data-root", type=Path, help="Folder of the tasks' data, for SmolLM2's rows.")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("There is no CUDA device here. --quick runs all of it on the CPU at a tiny size.")
    warnings.simplefilter("ignore")  # PEFT warns of initialisations that change the base weights
    device, job = ("cpu", TINY) if options.quick else ("cuda", Job())
    out, name = results_file(options), "cpu" if options.quick else torch.cuda.get_device_name()
    known = json.loads(out.read_text()) if out is not None and out.exists() else {"models": {}}
    if known.get("device", name) != name:
        raise SystemExit(f"{out} was measured on {known['device']}, this is {name}. Name another.")
    models = known["models"]
    shapes = {model: TINY_SHAPE if options.quick else SHAPES[model] for model in options.models}
    makers = {model: partial(random_bench, shape, device, job) for model, shape in shapes.items()}
    if options.smollm2:
        makers = {SMOLLM2: partial(smollm2_bench, options.smollm2, options.data_root, device, job), **makers}
    for model, make in makers.items():
        if "error" in models.get(model, {}).get("race", {"error": ""}):
            print(f"{model}: ", end="", flush=True)
            models[model] = {"race": attempted(make)}
            write_found(options, rank=RANK, job=asdict(job), device=name, models=models)
    print(table_of({"models": models}))


if __name__ == "__main__":
    main()
