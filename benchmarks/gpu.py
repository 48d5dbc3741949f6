"""Steps, calibration and peak memory on one GPU, at the shapes of real models and on SmolLM2.

    python benchmarks/gpu.py                      # about three minutes; --smollm2 FOLDER adds the real model
    python benchmarks/gpu.py --tiny               # on a CPU in seconds: does it run?

Qwen2.5-1.5B and 3B (7B if asked) have random weights; SmolLM2 its own, and rows of real text where there is a
``--data-root``. bfloat16, rank 16 on q, k, v and o, no checkpointing. The contestants are the floor without adapter,
PEFT's LoRA, DoRA and PiSSA, and frozen cores. A step is of one row of 512 tokens, or of eight rows of 128 accumulated,
the paper's batch at about the length of an SVAMP prompt. The step of one row is also replayed from a CUDA graph, which
leaves out the launching of kernels. Calibration reads 128 examples of 128 tokens.

A model whose measurement fails is recorded with its error and the others continue. The file is written after every
model, and a model in it is not measured again, so the same command resumes.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from contestants import CONTESTANTS, FLOOR, LABELS, RANK, Stepper, adapter_config, completion_batch, random_ids
from frozencore import calibrate
from frozencore.files.atomic_write import write_json
from frozencore.tune.cost import values_at_once
from frozencore.tune.provenance import provenance
from frozencore.tune.task_registry import find_task
from frozencore.tune.tasks.splits import evaluation_rows
from harness import RESULTS, synchronise, table, wall_s

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


def race(bench: Bench) -> Found:
    """Rounds over all contestants, the second in reverse: medians of times, the largest of all else, and the runs."""
    rows: dict[str, list[Found]] = {name: [] for name in CONTESTANTS}
    for number in range(bench.job.rounds):
        for name in CONTESTANTS[:: -1 if number % 2 else 1]:
            rows[name].append(_race_once(bench, name))
    summaries = {}
    for contestant, runs in rows.items():
        found: Found = {"num_runs": len(runs)}
        for name in runs[0]:
            values = [run[name] for run in runs]
            found[name] = None if None in values else median(values) if name.endswith("_s") else max(values)
        summaries[contestant] = found | {"runs": runs}
    for name in CONTESTANTS:  # after all peaks: each stream that captures keeps memory of cuBLAS
        summaries[name]["graph_s"] = _replayed_s(bench, name)
    return summaries


def _race_once(bench: Bench, name: str) -> Found:
    """One contestant's calibration, both kinds of step, and their peaks."""
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


def _replayed_s(bench: Bench, name: str) -> float | None:
    """Seconds of a step whose forward and backward pass is replayed from a CUDA graph; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    batch = completion_batch(bench.ids(1, bench.job.long))
    with bench.adapted(name) as model:
        stepper = Stepper(model)
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


def _calibrate(bench: Bench, model: nn.Module, name: str, num_batches: int) -> dict[str, float]:
    """Our calibration, or the floor: a plain forward and backward pass over the same examples, of the same logits."""
    found: dict[str, float] = {}
    rows = bench.ids(num_batches * bench.job.rows, bench.job.short).split(bench.job.rows)

    def ours() -> None:
        batches = []
        for ids in rows:  # labels for every token, as a data loader gives them; the last quarter is the completion
            labels = ids.clone()
            labels[:, : 3 * ids.shape[1] // 4] = -100
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        calibration = calibrate(model, batches, progress=False)
        found.update(calibration_collect_s=calibration.collect_s, calibration_build_s=calibration.build_s)

    def plain() -> None:
        model.eval()
        for ids in rows:
            model(**completion_batch(ids)).loss.backward()

    found["calibration_s"] = wall_s(ours if name == "frozencore" else plain)
    return found


# ----------------------------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model; ``width`` is the hidden size."""

    width: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int


SMOLLM2 = "SmolLM2-135M"
SHAPES = {
    "Qwen2.5-1.5B": Architecture(1536, 8960, 28, 12, 2, 151936),
    "Qwen2.5-3B": Architecture(2048, 11008, 36, 16, 2, 151936),
    "Qwen2.5-7B": Architecture(3584, 18944, 28, 28, 4, 152064),
}
TINY_SIZES = Architecture(64, 128, 2, 4, 2, 256)


def random_model(sizes: Architecture, device: str) -> nn.Module:
    """A Qwen2 model of those sizes with random weights, made where it will run."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", hidden_size=sizes.width, intermediate_size=sizes.intermediate, num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_kv_heads, vocab_size=sizes.vocabulary,
        max_position_embeddings=32768, tie_word_embeddings=sizes.width <= 2048, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).requires_grad_(False)


def smollm2_bench(folder: Path, data_root: Path | None, device: str, job: Job) -> Bench:
    """The real model, with the evaluation rows of SST-2 end to end if they are at hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_cache=False)
    text = None
    if data_root is not None:
        rows = evaluation_rows(find_task("sst2"), data_root, num_evaluation=500)
        joined = "\n\n".join(f"{row.prompt}{row.completion}" for row in rows)
        text = torch.tensor(AutoTokenizer.from_pretrained(folder)(joined, verbose=False)["input_ids"])
    return Bench(model.to(device).requires_grad_(False), job, text)


def attempted(make: Callable[[], Bench]) -> Found:
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
    """Each model's race on a GPU."""
    body = []
    for model, sections in found["models"].items():
        for racer, row in sections.get("race", {}).items():
            start = "" if row.get("calibration_s") is None else f"{row['calibration_s']:.1f}"
            graph = "" if row.get("graph_s") is None else f"{1e3 * row['graph_s']:.1f}"
            times = [f"{1e3 * row['step_s']:.0f}", graph, f"{row['accumulated_s']:.2f}"]
            body.append([model, LABELS[racer], start, *times, f"{row['num_trainable']:,}"])
    heads = ["model", "", "start, s", "1 x 512, ms", "from a graph", "8 x (1 x 128), s", "trained values"]
    return table(heads, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["Qwen2.5-1.5B", "Qwen2.5-3B"])
    parser.add_argument("--smollm2", type=Path, help="Folder of SmolLM2; it is left out without one.")
    parser.add_argument("--data-root", type=Path, help="Folder of the tasks' data, for SmolLM2's rows.")
    parser.add_argument("--tiny", action="store_true", help="Two narrow layers on the CPU; its times mean nothing.")
    parser.add_argument("--out", type=Path, help="Default: results/gpu.json beside this file; none with --tiny.")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("There is no CUDA device here. --tiny runs all of it on the CPU at a tiny size.")

    warnings.simplefilter("ignore")  # PEFT warns of initialisations that change the base weights
    device, job = ("cpu", TINY) if options.tiny else ("cuda", Job())
    out = options.out or (None if options.tiny else RESULTS / "gpu.json")
    known = json.loads(out.read_text()) if out is not None and out.exists() else {"models": {}}
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    if known.get("device", name) != name:
        raise SystemExit(f"{out} was measured on {known['device']}, this is {name}. Name another.")
    about = {"benchmark": "gpu", "tiny": options.tiny, "rank": RANK, "job": asdict(job), "device": name}
    content = {**about, "provenance": provenance(), "models": known["models"]}
    makers: dict[str, Callable[[], Bench]] = {
        model: lambda sizes=TINY_SIZES if options.tiny else SHAPES[model]: Bench(random_model(sizes, device), job)
        for model in options.models
    }
    if options.smollm2:
        makers = {SMOLLM2: lambda: smollm2_bench(options.smollm2, options.data_root, device, job), **makers}
    for model, make in makers.items():
        if "error" in content["models"].get(model, {}).get("race", {"error": ""}):
            print(f"{model}: ", end="", flush=True)
            content["models"].setdefault(model, {})["race"] = attempted(make)
            if out is not None:
                write_json(out, content)
    print(table_of({"models": {name: of for name, of in content["models"].items() if "error" not in of["race"]}}))


if __name__ == "__main__":
    main()
