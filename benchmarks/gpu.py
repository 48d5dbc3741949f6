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
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import speed_tables
from contestants import RANK, random_model
from frozencore.files.whole_file import write_json
from frozencore.tune.run.provenance import provenance
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import evaluation_rows
from gpu_sections import TINY, Bench, Job, compiled_steps, free_memory, graphed_steps, kernels, race
from gpu_tenants import one_batch, trained_together
from harness import RESULTS
from projection import QWEN_1_5B, QWEN_3B, QWEN_7B
from shapes import Architecture

SMOLLM2 = "SmolLM2-135M"
SHAPES = {"Qwen2.5-1.5B": QWEN_1_5B, "Qwen2.5-3B": QWEN_3B, "Qwen2.5-7B": QWEN_7B}
DEFAULT = (SMOLLM2, "Qwen2.5-1.5B", "Qwen2.5-3B")
TINY_SIZES = Architecture(64, 128, 2, 4, 2, 256, 16)
PAPER = {  # Table "phase profile" on Qwen2.5-3B: seconds of initialisation or calibration, seconds a step, peak GB
    "frozencore": (35, 0.81, 6.92),
    "lora": (None, 0.92, 7.19),
    "dora": (None, 1.31, 7.27),
    "pissa": (41, 1.76, 7.20),
}


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


def show(content: Mapping[str, Any]) -> None:
    print(speed_tables.gpu_targets(content))
    print(speed_tables.gpu(content))
    print(speed_tables.gpu_more(content))


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
        "tiny": options.tiny, "rank": RANK, "job": asdict(job), "paper_h20": PAPER,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip
    out = options.out or (None if options.tiny else RESULTS / "gpu.json")
    report = Report(out, setting)
    sections = options.sections or [name for name in SECTIONS if not (options.tiny and name == "compile")]
    models = [name for name in options.models if name != SMOLLM2 or options.smollm2]
    stage = Stage(device, job, options.smollm2, options.data_root, options.tiny)
    left = measure(plan(models, sections), stage, options.budget, report)
    show(report.content)
    if left:
        print(f"No time was left for: {'; '.join(left)}. The same command goes on with them.")


if __name__ == "__main__":
    main()
