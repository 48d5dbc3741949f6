"""One basis in the engine against a LoRA for each tenant, both in vLLM on this CPU (``make engines``).

    OMP_NUM_THREADS=1 python benchmarks/served.py             # half an hour;  --quick: a tiny model, two rounds
    OMP_NUM_THREADS=1 python benchmarks/served.py --smollm2   # a real model

The base model, the basis model, and the base model with LoRAs of the cores' rank and of rank 1 are four engines, of
which one works at a time; random weights, cores and bases, which cost what any cost. A LoRA is the exact export of its
tenant, so that these engines must give the same tokens; one of rank 1 is random. ``rows``: a batch of prompts, each row
of one of 1, 16 or 64 tenants, greedy; the engines take turns, and each time is divided by the base model's of the same
round, by the clock: measure while the machine stands still. ``processor_s`` are those of all processes of an engine, of
which one waits in a loop while another computes. ``slot_bytes`` are those of the tensors that the engine holds for a
slot, ``load_s`` what ``add_lora`` takes for an adapter in a folder, ``put`` what a tenant takes whose weights are in
memory. ``sync``: what a step of reinforcement learning takes before the engine can sample: of a core, its weights to
bytes and into the engine; of a LoRA, PEFT's ``save_pretrained`` and ``add_lora``. ``first``: from there to the first
token.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from contestants import ATTENTION, UNCALIBRATED, adapter_config
from frozencore import export_basis_model, export_lora, export_tenant, frozen_core_layers, tenant_weights
from frozencore.tune.locate import smollm2_path
from harness import ROOT, Quartiles, load_average, parser_of, quartiles, ratios, table, with_range, write_found

PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
SETTINGS = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip

SYNCS = 20
BASE, BASIS, LORA, LORA_1 = "base model", "basis model", "LoRA", "LoRA, r = 1"


@dataclass(frozen=True)
class Plan:
    """Sizes of the model and of the batches; a batch has at most so many tenants, which have a slot each."""

    model: str | None = None
    layers: int = 8
    width: int = 512
    rank: int = 16
    rows: int = 64
    prompt_tokens: int = 8
    new_tokens: int = 16
    tenants: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5


QUICK = Plan(layers=2, width=128, rank=8, rows=4, new_tokens=3, tenants=(1, 4), rounds=2)
SMOLLM2 = Plan(model="smollm2", layers=30, width=576, rounds=4)


def environment(**settings: str) -> dict[str, str]:
    """The variables of a process of vLLM, which has packages of its own."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | SETTINGS | settings


class Driven:
    """An engine in a process of its own."""

    def __init__(self, log: Path, **settings: Any) -> None:
        script = Path(__file__).with_name("served_engine.py")
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment(),
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


class Tenants:
    """Models and tenants on disk."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        base = make_base(plan)
        self.vocabulary = base.config.vocab_size
        base.save_pretrained(folder / BASE)
        self.model = get_peft_model(base, adapter_config(UNCALIBRATED, rank=plan.rank)).eval()
        self.model.save_pretrained(str(folder / "adapter"))
        export_basis_model(folder / "adapter", folder / BASIS, base=folder / BASE)
        self.folders: dict[str, list[str]] = {BASIS: [], LORA_1: [], LORA: []}
        self.files: list[str] = []
        generator = torch.Generator().manual_seed(0)
        layers = frozen_core_layers(self.model, "default")
        for tenant in range(max(plan.tenants)):
            with torch.no_grad():
                for layer in layers.values():
                    R = layer.core("default")
                    R.copy_(0.5 * torch.randn(R.shape, generator=generator))
            self.files.append(str(folder / f"{tenant}.safetensors"))
            Path(self.files[-1]).write_bytes(tenant_weights(self.model))
            for kind, export in ((BASIS, export_tenant), (LORA, export_lora)):
                place = folder / f"{kind} {tenant}"
                export(self.model, place)
                self.folders[kind].append(str(place))
        lora = random_lora(folder, rank=1)
        for tenant in range(max(plan.tenants)):
            with torch.no_grad():
                for name, factor in lora.named_parameters():
                    if "lora_" in name:
                        factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
            self.folders[LORA_1].append(str(folder / f"{LORA_1} {tenant}"))
            lora.save_pretrained(self.folders[LORA_1][-1])

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.vocabulary, (count, self.plan.prompt_tokens), generator=drawn).tolist()


def random_lora(folder: Path, rank: int) -> Any:
    """The base model with PEFT's LoRA."""
    config = adapter_config("lora", rank=rank)
    config.init_lora_weights = False
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder / BASE, dtype=torch.float32), config)


def make_base(plan: Plan) -> Any:
    """The model of the plan in float32; random weights if it names none."""
    if plan.model:
        return AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=512, hidden_size=plan.width, intermediate_size=plan.width * 11 // 4, num_hidden_layers=plan.layers,
        num_attention_heads=plan.width // 64, num_key_value_heads=plan.width // 64, head_dim=64,
        max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def measure(plan: Plan, folder: Path) -> dict[str, Any]:
    """Slots, loads, rounds, and new weights at each step."""
    tenants = Tenants(plan, folder)
    slots = max(plan.tenants)
    common, of_lora = {"rows": plan.rows}, {"slots": slots, "targets": list(ATTENTION)}
    engines = {
        BASE: Driven(folder / "base.log", model=str(folder / BASE), slots=0, rank=plan.rank, targets=None, **common),
        BASIS: Driven(
            folder / "basis.log", model=str(folder / BASIS), slots=slots, rank=plan.rank, targets=["core"],
            known=slots + SYNCS + 1, **common,
        ),
        LORA_1: Driven(folder / "lora-1.log", model=str(folder / BASE), rank=1, **of_lora, **common),
        LORA: Driven(folder / "lora.log", model=str(folder / BASE), rank=plan.rank, **of_lora, **common),
    }  # fmt: skip
    print(f"{len(engines)} engines are up")
    found: dict[str, Any] = {"adapter": {}, "rows": []}
    for kind in tenants.folders:
        loading = engines[kind].say("load", folders=tenants.folders[kind])
        files = [sum(file.stat().st_size for file in Path(place).iterdir()) for place in tenants.folders[kind]]
        found["adapter"][kind] = {
            **engines[kind].say("slot"),
            "disk_bytes": median(files),
            "load_s": loading["processor_s"],
            "load_clock_s": median(loading["load_s"]),
        }
    found |= rounds(plan, tenants, engines)
    found["sync"] = {BASIS: sync_core(tenants, engines[BASIS]), LORA: sync_lora(plan, folder, engines[LORA])}
    for engine in engines.values():
        engine.end()
    return found


def rounds(plan: Plan, tenants: Tenants, engines: dict[str, Driven]) -> dict[str, Any]:
    """The engines take turns at one batch; their answers are compared."""
    prompts = tenants.prompts(plan.rows, seed=1)
    turns = [(BASE, 0), (BASIS, 0), *((kind, count) for count in plan.tenants for kind in tenants.folders)]
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
        print(f"round {number} of {plan.rounds}", flush=True)
    num_tokens = plan.rows * plan.new_tokens
    rows = [
        {"engine": kind, "tenants": count, "tokens_per_s": num_tokens / median(taken),
         "of_base": ratios(clock[BASE, 0], taken), "clock_s": taken, "processor_s": times[kind, count]}
        for (kind, count), taken in clock.items()
    ]  # fmt: skip
    compared = (plan.rounds + 1) * plan.rows * (1 + len(plan.tenants))
    return {"rows": rows, "answers_compared": compared, "answers_that_differ": differing}


def sync_core(tenants: Tenants, engine: Driven) -> dict[str, list[float]]:
    """Seconds by the clock: a core to bytes, the bytes into the engine, and both with the first token."""
    made = []
    for _ in range(SYNCS):
        begins = perf_counter()
        tenant_weights(tenants.model)
        made.append(perf_counter() - begins)
    files = [tenants.files[i % len(tenants.files)] for i in range(SYNCS)]
    prompt = tenants.prompts(1, seed=0)[0]
    entered = engine.say("put", files=files)["load_s"]
    return {
        "made_s": made,
        "entered_s": entered,
        "first_token_s": engine.say("first", places=files, prompt=prompt)["clock_s"],
    }


def sync_lora(plan: Plan, folder: Path, engine: Driven) -> dict[str, list[float]]:
    """The same for PEFT's LoRA: saved to a folder, loaded from there."""
    model = random_lora(folder, plan.rank)
    made, places = [], [str(folder / f"step {i}") for i in range(2 * SYNCS)]
    for place in places:
        begins = perf_counter()
        model.save_pretrained(place)
        made.append(perf_counter() - begins)
    entered = engine.say("load", folders=places[:SYNCS])["load_s"]
    prompt = list(range(3, 3 + plan.prompt_tokens))
    return {
        "made_s": made,
        "entered_s": entered,
        "first_token_s": engine.say("first", places=places[SYNCS:], prompt=prompt)["clock_s"],
    }


def version_of(package: str) -> str:
    """The version of a package in vLLM's environment."""
    asked = [PYTHON, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def table_of(found: Mapping[str, Any]) -> str:
    """An adapter's size and loading in vLLM, and the share of the base model's tokens a second."""
    sizes = [
        [name, f"{one['slot_bytes']:,.0f}", f"{1e9 // one['slot_bytes']:,.0f}", f"{one['disk_bytes']:,.0f}",
         f"{1e3 * one['load_clock_s']:.1f} ms"]
        for name, one in found["adapter"].items()
    ]  # fmt: skip
    heads = ["an adapter in vLLM", "bytes a slot", "slots in 1 GB", "bytes on disk", "time to load"]
    kinds = [*found["adapter"]]
    shares = [[str(count), *(share(found, kind, count) for kind in kinds)] for count in found["plan"]["tenants"]]
    text = f"{table(heads, sizes)}\n{table(['tenants in the batch', *kinds], shares)}"
    return f"{text}\n{sync(found['sync'])}" if "sync" in found else text


def rates_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The tokens a second of each engine with 64 tenants, and of the base model alone."""
    return {row["engine"]: row["tokens_per_s"] for row in found["rows"] if row["tenants"] in (0, 64)}


def sync(found: Mapping[str, Any]) -> str:
    """Milliseconds that reinforcement learning waits at each step for new weights."""
    each = ("made_s", "entered_s", "first_token_s")
    rows = [
        [name, *(f"{with_range(quartiles([1e3 * s for s in found[kind][what]]), '.1f')} ms" for what in each)]
        for kind, name in ((BASIS, "core, in memory"), (LORA, "LoRA, in a folder"))
    ]
    return table(["new weights at each step", "out of the trainer", "into the engine", "and to the first token"], rows)


def share(found: Mapping[str, Any], engine: str, count: int) -> str:
    return with_range(of_base(found, engine, count), ".0%")


def of_base(found: Mapping[str, Any], engine: str, count: int) -> Quartiles:
    """The share of the base model's tokens a second in runs beside each other: quartiles."""
    return next(row["of_base"] for row in found["rows"] if (row["engine"], row["tenants"]) == (engine, count))


def main() -> None:
    parser = parser_of(__doc__, "served-random")
    parser.add_argument(
        "--smollm2", action="store_true", help="SmolLM2-135M-Instruct (make smollm2), not random weights."
    )
    options = parser.parse_args()
    if options.smollm2:
        options.name = "served"
    if not PYTHON.exists():
        raise SystemExit(f"There is no vLLM in {PYTHON.parents[1]}. Run: make engines")
    plan = QUICK if options.quick else SMOLLM2 if options.smollm2 else Plan()
    with TemporaryDirectory() as folder:
        found = measure(plan, Path(folder))
    engine = {name: version_of(name) for name in ("vllm-cpu", "transformers", "torch")}
    result = {"plan": vars(plan), **found, "engine": engine, "load": load_average()}
    print(table_of(result))
    write_found(options, **result)


if __name__ == "__main__":
    main()
