"""Tenants in llama.cpp's server on this CPU: SmolLM2's file of 4 bits, and a LoRA of each core (``make engines``).

    python benchmarks/served_llama_cpp.py --model SmolLM2-135M-Instruct.Q4_1.gguf    # minutes;  --quick: two tenants

The other engine of docs/serving.md beside served.py, with the same sizes. llama.cpp loads adapters at its start alone,
applies what ``/lora-adapters`` or a request names, and computes only requests of one adapter together. ``rows``: 64
prompts at once, each of one of 1, 16 or 64 tenants, greedy, with one thread; a server without adapters and one with all
of them take turns, and each time is divided by that of the first in the same round. Times are processor seconds of the
server; ``clock`` has those of the clock. ``swap_s`` is what ``/lora-adapters`` takes to turn the server from one tenant
to another, ``first_token_s`` what the next token takes after that, by the clock. Then each tenant's answer in the mixed
batch is compared with its answer when it is asked alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.request import Request, urlopen

import psutil
import torch
from peft import get_peft_model

import tenant_tables
from contestants import UNCALIBRATED, adapter_config
from frozencore import export_gguf_lora, frozen_core_layers
from frozencore.tune.run.models import load_model
from harness import ROOT, load_average, machine_name, parser_of, quartiles, ratios, write_found

HOME = ROOT / ".engines" / "llama.cpp"
START_S = 300


@dataclass(frozen=True)
class Plan:
    """Sizes of the batches; a batch has the requests of so many tenants."""

    rank: int = 16
    rows: int = 64
    prompt_tokens: int = 8
    new_tokens: int = 16
    tenants: tuple[int, ...] = (1, 16, 64)
    rounds: int = 3
    swaps: int = 20


QUICK = Plan(rows=4, new_tokens=3, tenants=(1, 2), rounds=1, swaps=2)


class Server:
    """``llama-server`` in ``with``; no adapter is applied to a request that names none."""

    def __init__(self, plan: Plan, model: Path, loras: Sequence[Path], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        tokens = plan.rows * (plan.prompt_tokens + plan.new_tokens + 8)
        self.command = [HOME / "bin" / "llama-server", "--model", model, "--threads", "1", "--port", str(self.port)]
        self.command += ["--parallel", str(plan.rows), "--ctx-size", str(tokens)]
        self.command += [word for lora in loras for word in ("--lora", lora)]
        self.plan, self.loras, self.log = plan, loras, log

    def __enter__(self) -> Self:
        begins = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        while time.perf_counter() - begins < START_S and self.process.poll() is None:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{self.port}/health"):
                self.start_s = time.perf_counter() - begins
                self.resident_bytes = psutil.Process(self.process.pid).memory_info().rss
                self.choose(None)
                return self
            time.sleep(0.05)
        self.process.kill()
        raise SystemExit(f"llama-server did not start:\n{self.log.read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def post(self, path: str, body: object) -> Any:
        request = Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request) as answer:
            return json.load(answer)

    def choose(self, tenant: int | None) -> float:
        """Which adapter requests get that name none; seconds by the clock."""
        begins = time.perf_counter()
        self.post("/lora-adapters", [{"id": i, "scale": float(i == tenant)} for i in range(len(self.loras))])
        return time.perf_counter() - begins

    def ask(self, prompt: list[int], num_tokens: int, tenant: int | None = None) -> list[int]:
        named = {} if tenant is None else {"lora": [{"id": tenant, "scale": 1.0}]}
        asked = {
            "prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        tokens: list[int] = self.post("/completion", asked | named)["tokens"]
        return tokens

    def batch(self, prompts: list[list[int]], tenants: int) -> dict[str, Any]:
        """All prompts at once; no tenants is no adapter."""
        named = [i % tenants if tenants else None for i in range(len(prompts))]
        begins, used = time.perf_counter(), self.processor_s()
        with ThreadPoolExecutor(len(prompts)) as threads:
            tokens = list(
                threads.map(
                    lambda one: self.ask(one[0], self.plan.new_tokens, one[1]), zip(prompts, named, strict=True)
                )
            )
        return {"tokens": tokens, "clock_s": time.perf_counter() - begins, "processor_s": self.processor_s() - used}

    def processor_s(self) -> float:
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)


def make_tenants(plan: Plan, file: Path, folder: Path) -> tuple[list[Path], int]:
    """A file for each tenant with random cores on one random basis, and the size of the model's vocabulary."""
    model = get_peft_model(load_model(str(file), device="cpu")[0], adapter_config(UNCALIBRATED, rank=plan.rank))
    generator = torch.Generator().manual_seed(0)
    files = []
    for tenant in range(max(plan.tenants)):
        with torch.no_grad():
            for layer in frozen_core_layers(model, "default").values():
                R = layer.core("default")
                R.copy_(0.5 * torch.randn(R.shape, generator=generator))
        files.append(folder / f"{tenant}.gguf")
        export_gguf_lora(model, files[-1])
        print(f"\r{tenant + 1} of {max(plan.tenants)} tenants", end="", flush=True)
    print()
    return files, model.config.vocab_size


def measure(plan: Plan, file: Path, folder: Path) -> dict[str, Any]:
    """Start, memory, rounds, swaps, and each tenant alone."""
    loras, vocabulary = make_tenants(plan, file, folder)
    drawn = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, vocabulary, (plan.rows, plan.prompt_tokens), generator=drawn).tolist()
    with ExitStack() as stack:
        plain = stack.enter_context(Server(plan, file, [], folder / "plain.log"))
        server = stack.enter_context(Server(plan, file, loras, folder / "tenants.log"))
        turns = {"no adapters": (plain, 0), "adapters, none chosen": (server, 0)}
        turns |= {str(count): (server, count) for count in plan.tenants}
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
        for number in range(plan.rounds + 1):  # the first is to warm up
            for name, (one, count) in turns.items():
                found = one.batch(prompts, count)
                taken[name] += [found] if number else []
            print(f"round {number} of {plan.rounds}", flush=True)
        alone = [server.ask(prompt, plan.new_tokens, i % len(loras)) for i, prompt in enumerate(prompts)]
        swaps, firsts, same = [], [], []
        for number in range(plan.swaps):
            swaps.append(server.choose(number % len(loras)))
            for times in (firsts, same):  # after the swap, and once more without one
                begins = time.perf_counter()
                server.ask(prompts[0], 1)
                times.append(time.perf_counter() - begins)
    mixed, of_base = (taken[name][-1]["tokens"] for name in (str(max(plan.tenants)), "no adapters"))
    base = [found["processor_s"] for found in taken["no adapters"]]
    num_tokens = plan.rows * plan.new_tokens
    return {
        "rows": [
            {"tenants": name, "tokens_per_s": num_tokens / median(found["processor_s"] for found in all_),
             "of_base": ratios(base, [found["processor_s"] for found in all_]),
             "clock_s": [found["clock_s"] for found in all_]}
            for name, all_ in taken.items()
        ],
        "start_s": {"no adapters": plain.start_s, "adapters": server.start_s},
        "disk_bytes": median(lora.stat().st_size for lora in loras),
        "memory_bytes_each": (server.resident_bytes - plain.resident_bytes) / len(loras),
        "swap_s": quartiles(swaps),
        "first_token_s": {"after a swap": quartiles(firsts), "without": quartiles(same)},
        "answers": len(prompts),
        "answers_that_differ_from_alone": sum(one != other for one, other in zip(mixed, alone, strict=True)),
        "answers_of_the_base": sum(one == other for one, other in zip(mixed, of_base, strict=True)),
    }  # fmt: skip


def version_of(package: str) -> str:
    asked = [HOME / "bin" / "python", "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = parser_of(__doc__, f"served-llama-cpp-{machine_name()}")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2's GGUF file.")
    options = parser.parse_args()
    if not (HOME / ".installed").exists():
        raise SystemExit(f"There is no llama.cpp in {HOME}. Run: make engines")
    plan = QUICK if options.quick else Plan()
    with TemporaryDirectory() as folder:
        found = measure(plan, options.model, Path(folder))
    result = {"plan": vars(plan), **found, "engine": version_of("xllamacpp"), "load": load_average()}
    print(tenant_tables.served_llama_cpp(result))
    write_found(options, **result)


if __name__ == "__main__":
    main()
