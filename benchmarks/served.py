"""One basis in the engine against a LoRA for each tenant, both in vLLM on this CPU (``make engines``).

    OMP_NUM_THREADS=1 python benchmarks/served.py             # half an hour;  --quick: a tiny model, two rounds

The base model, the basis model and the base model with LoRAs are three engines, of which one works at a time; random
weights, cores and bases, which cost what any cost. A LoRA is the exact export of its tenant, so that all engines must
give the same tokens. ``rows``: a batch of prompts, each row of one of 1, 16 or 64 tenants, greedy; the engines take
turns, and each time is divided by the base model's of the same round. Times are processor seconds of all processes of
an engine, of which one computes at a time; ``clock`` has those of the clock, which others' programs lengthen.
``slot_bytes`` are those of the tensors that the engine holds for a slot, ``load_s`` what ``add_lora`` takes for an
adapter in a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import tenant_tables
from contestants import ATTENTION, UNCALIBRATED, adapter_config
from frozencore import export_basis_model, export_lora, export_tenant, frozen_core_layers
from harness import ROOT, load_average, machine_name, parser_of, ratios, write_found
from tenant_tables import BASE, BASIS, LORA

PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
SETTINGS = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Sizes of the model and of the batches."""

    layers: int = 8
    width: int = 512
    rank: int = 16
    rows: int = 64
    prompt_tokens: int = 8
    new_tokens: int = 16
    tenants: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5


QUICK = Plan(layers=2, width=128, rank=8, rows=4, new_tokens=3, tenants=(1, 4), rounds=2)


class Driven:
    """An engine in a process of its own."""

    def __init__(self, log: Path, **settings: Any) -> None:
        script = Path(__file__).with_name("served_engine.py")
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=kept | SETTINGS,
            )  # fmt: skip
        self.log = log
        self.say("start", **settings)

    def say(self, word: str, **given: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([word, given]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM ended at {word!r}:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def write_models(plan: Plan, folder: Path) -> dict[str, list[str]]:
    """The base and the basis model; adapter folders by engine."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=plan.width, intermediate_size=plan.width * 11 // 4, num_hidden_layers=plan.layers,
        num_attention_heads=plan.width // 64, num_key_value_heads=plan.width // 64, head_dim=64,
        max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / BASE)
    model = get_peft_model(base, adapter_config(UNCALIBRATED, rank=plan.rank)).eval()
    model.save_pretrained(str(folder / "adapter"))
    export_basis_model(folder / "adapter", folder / BASIS, base=folder / BASE)
    folders: dict[str, list[str]] = {BASIS: [], LORA: []}
    generator = torch.Generator().manual_seed(0)
    for tenant in range(max(plan.tenants)):
        with torch.no_grad():
            for layer in frozen_core_layers(model, "default").values():
                R = layer.core("default")
                R.copy_(0.5 * torch.randn(R.shape, generator=generator))
        for kind, export in ((BASIS, export_tenant), (LORA, export_lora)):
            place = folder / f"{kind} {tenant}"
            export(model, place)
            folders[kind].append(str(place))
    return folders


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Slots, loads and rounds."""
    folders = write_models(plan, folder)
    slots = max(plan.tenants)
    common = {"rank": plan.rank, "rows": plan.rows}
    engines = {
        BASE: Driven(folder / "base.log", model=str(folder / BASE), slots=0, targets=None, **common),
        BASIS: Driven(folder / "basis.log", model=str(folder / BASIS), slots=slots, targets=["core"], **common),
        LORA: Driven(folder / "lora.log", model=str(folder / BASE), slots=slots, targets=list(ATTENTION), **common),
    }
    print("three engines are up")
    found: dict[str, Any] = {"adapter": {}, "rows": []}
    for kind in (BASIS, LORA):
        loading = engines[kind].say("load", folders=folders[kind])
        files = [sum(file.stat().st_size for file in Path(place).iterdir()) for place in folders[kind]]
        found["adapter"][kind] = {
            **engines[kind].say("slot"),
            "disk_bytes": median(files),
            "load_s": loading["processor_s"],
            "load_clock_s": median(loading["load_s"]),
        }
    prompts = torch.randint(
        3, 500, (plan.rows, plan.prompt_tokens), generator=torch.Generator().manual_seed(1)
    ).tolist()
    turns = [(BASE, 0), (BASIS, 0), *((kind, count) for count in plan.tenants for kind in (BASIS, LORA))]
    times: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    clock: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    differing = 0
    for number in range(plan.rounds + 1):  # the first is to warm up
        tokens = {}
        for kind, count in turns:
            answer = engines[kind].say("generate", prompts=prompts, num_tokens=plan.new_tokens, tenants=count)
            tokens[kind, count] = answer["tokens"]
            if number:
                times[kind, count].append(answer["processor_s"])
                clock[kind, count].append(answer["clock_s"])
        pairs = [(tokens[BASE, 0], tokens[BASIS, 0])]
        pairs += [(tokens[BASIS, count], tokens[LORA, count]) for count in plan.tenants]
        differing += sum(one != other for pair in pairs for one, other in zip(*pair, strict=True))
        print(f"round {number} of {plan.rounds}")
    for engine in engines.values():
        engine.end()
    num_tokens = plan.rows * plan.new_tokens
    for (kind, count), taken in times.items():
        found["rows"].append(
            {"engine": kind, "tenants": count, "tokens_per_s": num_tokens / median(taken),
             "of_base": ratios(times[BASE, 0], taken), "clock_s": clock[kind, count]}
        )  # fmt: skip
    compared = (plan.rounds + 1) * plan.rows * (1 + len(plan.tenants))
    return {**found, "answers_compared": compared, "answers_that_differ": differing}


def version_of(package: str) -> str:
    """The version of a package in vLLM's environment."""
    asked = [PYTHON, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    options = parser_of(__doc__, f"served-{machine_name()}").parse_args()
    if not PYTHON.exists():
        raise SystemExit(f"There is no vLLM in {PYTHON.parents[1]}. Run: make engines")
    plan = QUICK if options.quick else Plan()
    with TemporaryDirectory() as folder:
        found = measure(plan, Path(folder))
    engine = {name: version_of(name) for name in ("vllm-cpu", "transformers", "torch")}
    result = {"plan": vars(plan), **found, "engine": engine, "load": load_average()}
    print(tenant_tables.served(result))
    write_found(options, **result)


if __name__ == "__main__":
    main()
