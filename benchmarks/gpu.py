"""Steps, calibration and peak memory at the shapes of real models on one GPU, in bfloat16 with random weights.

    python benchmarks/gpu.py             # under eight minutes
    python benchmarks/gpu.py --tiny      # on a CPU in seconds, nothing compiled: does it run?
    python benchmarks/gpu.py --sections "CUDA graphs" race     # these alone

Qwen2.5-1.5B, 3B and 7B and Llama-3.2-1B, built on the device from their configurations, without checkpointing; rank 16
on q, k, v and o. Every racer (the floor without adapter, PEFT's LoRA, DoRA and PiSSA, frozen cores) takes steps of one
row of 512 tokens, and of eight rows of 128 accumulated, the paper's batch at about the length of an SVAMP prompt.
Calibration reads 128 examples of 128 tokens, eight a batch; its floor is a plain pass over them.

What matters most comes first, all of it of the first model before the others: the step replayed from a CUDA graph,
which no launching slows down; the race of eager steps, with calibration, its parts and peaks; compiled steps of a few
blocks; 32 tenants and more trained at once; a batch of 64 tenants; what larger products and batched SVDs save. Then
what is slow by design, PiSSA's full SVD (one block, times their number) and PEFT's EVA (with a limit), and last the
kernels of a step, and for how long the device is busy with them.

What fails, for want of memory for instance, is written down with its error and the rest goes on; what does not fit
into ``--budget`` seconds is skipped and named. The file is written after every section. Beside Qwen2.5-3B stand the
figures of the paper's phase profile: one NVIDIA H20, its own software, real weights, SVAMP's own lengths.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from frozencore.files.whole_file import write_json
from frozencore.tune.run.provenance import provenance
from gpu_contest import RANK, TINY, Bench, Deadline, Job, eva, full_pissa, kernels, race
from gpu_faster import compiled_steps, graphed_steps
from gpu_products import products, svds
from gpu_tenants import lora_batch, one_batch, trained_together

QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-3B": QWEN | {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": QWEN | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
}  # fmt: skip
PAPER = {  # Table "phase profile": seconds of initialisation or calibration, seconds a step, peak GB
    "frozencore": (35, 0.81, 6.92),
    "lora": (None, 0.92, 7.19),
    "dora": (None, 1.31, 7.27),
    "pissa": (41, 1.76, 7.20),
}
EVA_LIMIT_S = 10.0
Section = Callable[[Bench], dict[str, Any]]
COMPILE, LORA_BATCH = "compile", "LoRA batch"
SECTIONS: dict[str, Section] = {
    "CUDA graphs": graphed_steps, "race": race, COMPILE: compiled_steps, "trained together": trained_together,
    "one batch": one_batch, "products": products, "SVDs": svds, LORA_BATCH: lora_batch, "full PiSSA": full_pissa,
    "EVA": partial(eva, limit_s=EVA_LIMIT_S), "kernels": kernels,
}  # fmt: skip


def random_model(sizes: dict[str, Any], device: str) -> nn.Module:
    """A model of those sizes with fresh weights, made where it will run."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**sizes, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(device).requires_grad_(False)


class Report:
    """What was found so far: a file that is whole at any time."""

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self.path = path
        self.started = time.perf_counter()
        self.content: dict[str, Any] = {"benchmark": "gpu", **setting, "provenance": provenance(), "models": {}}

    def add(self, model: str, section: str, found: dict[str, Any]) -> None:
        self.content["models"].setdefault(model, {})[section] = found
        self.content["used_s"] = time.perf_counter() - self.started
        if self.path is not None:
            write_json(self.path, self.content)


def run_sections(
    name: str,
    sizes: dict[str, Any],
    device: str,
    job: Job,
    deadline: Deadline,
    sections: dict[str, Section],
    report: Report,
) -> None:
    """Every section in its own try, on one model; nothing is started that has less than its share of time left."""
    base: nn.Module | None = None
    for section, measure in sections.items():
        if deadline.left_s < 0:
            report.add(name, section, {"skipped": "no time left within --budget"})
            continue
        try:
            base = random_model(sizes, device) if base is None else base
            report.add(name, section, measure(Bench(base, job, deadline)))
        except Exception as error:  # one that is out of memory must not lose the rest
            print(f"{name}, {section}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            where = traceback.format_exc().splitlines()[-12:]
            report.add(name, section, {"error": f"{type(error).__name__}: {error}"[:500], "traceback": where})
            base = None  # it may be half adapted
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def show(name: str, sections: dict[str, Any], job: Job) -> None:
    """A model's table, the paper's figures in brackets where it has them."""
    rows, floor = sections.get("race", {}), sections.get("race", {}).get("floor", {})
    table = Table(title=name)
    long, short = f"1 x {job.long}", f"{job.accumulation} x (1 x {job.short})"
    for heading in ("", "start", long, "over floor", short, "over floor", "peak", "trained"):
        table.add_column(heading, justify="right" if heading else "left")
    for racer in [racer for racer in rows if isinstance(rows[racer], dict)]:
        row, paper = rows[racer], PAPER.get(racer, (None, None, None)) if name == "Qwen2.5-3B" else (None, None, None)
        peak = row["accumulated_peak_bytes"]
        table.add_row(
            racer,
            _beside(_start_s(racer, row, sections), paper[0], "s"),
            f"{row['step_s'] * 1e3:.1f} ms",
            f"{row['step_s'] / floor['step_s']:.3f}" if floor else "",
            _beside(row["accumulated_s"], paper[1], "s"),
            f"{row['accumulated_s'] / floor['accumulated_s']:.3f}" if floor else "",
            _beside(None if peak is None else peak / 1e9, paper[2], "GB"),
            f"{row['num_trainable']:,}",
        )
    Console(width=130).print(table)
    for section, found in sections.items():
        if section not in ("race", "full PiSSA") or "error" in found or "skipped" in found:
            print(f"{name}, {section}: { {k: v for k, v in found.items() if k != 'traceback'} }")


def plan(models: list[str], asked: list[str], eva_limit_s: float) -> list[tuple[str, dict[str, Section]]]:
    """Models and the sections asked for, in the order of their worth: the first model's own before any other's."""
    slow: dict[str, Section] = {"full PiSSA": full_pissa, "EVA": partial(eva, limit_s=eva_limit_s)}
    others = {name: SECTIONS[name] for name in ("CUDA graphs", "race", "trained together")}
    first = {name: run for name, run in SECTIONS.items() if name not in (*slow, LORA_BATCH, "kernels")}
    steps = [(models[0], first), *((name, others) for name in models[1:]), (models[0], {LORA_BATCH: lora_batch})]
    steps += [(name, slow) for name in models]
    steps += [(name, {"kernels": kernels}) for name in models]  # a process that was profiled launches more slowly
    return [(name, {section: run for section, run in sections.items() if section in asked}) for name, sections in steps]


def _start_s(racer: str, row: dict[str, Any], sections: dict[str, Any]) -> float | None:
    if racer == "pissa":
        return sections.get("full PiSSA", {}).get("init_s")
    return row.get("calibration_s")


def _beside(measured: float | None, paper: float | None, unit: str) -> str:
    text = "" if measured is None else f"{measured:.3g} {unit}"
    return f"{text} [{paper:g}]" if paper is not None else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=420, help="Seconds after which no section is started.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--sections", nargs="+", choices=list(SECTIONS), help="These alone; --tiny compiles nothing else."
    )
    parser.add_argument("--tiny", action="store_true", help="Two narrow layers on the CPU; its times mean nothing.")
    parser.add_argument("--out", type=Path, help="Default: results/gpu.json beside this file; none with --tiny.")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("There is no CUDA device here. --tiny runs all of it on the CPU at a tiny size.")

    warnings.simplefilter("ignore")  # PEFT warns of initialisations that change the base weights
    device, job = ("cpu", TINY) if options.tiny else ("cuda", Job())
    models = {name: sizes | TINY_SIZES if options.tiny else sizes for name, sizes in MODELS.items()}
    deadline = Deadline(options.budget)
    setting = {
        "tiny": options.tiny, "budget_s": options.budget, "rank": RANK, "job": asdict(job), "paper_h20": PAPER,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }  # fmt: skip
    out = options.out or (None if options.tiny else Path(__file__).parent / "results" / "gpu.json")
    report = Report(out, setting)
    asked = options.sections or ([name for name in SECTIONS if name != COMPILE] if options.tiny else list(SECTIONS))
    for name, sections in plan(options.models, asked, 0.2 if options.tiny else EVA_LIMIT_S):
        run_sections(name, models[name], device, job, deadline, sections, report)
    for name, found in report.content["models"].items():
        show(name, found, job)


if __name__ == "__main__":
    main()
