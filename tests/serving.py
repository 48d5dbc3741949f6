"""Engines and what they serve: vLLM and llama.cpp as processes of their own, in the environments of ``make engines``,
asked over HTTP; a small model of a shape that they know, its adapters, prompts, and float64 answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fixtures import ROOT, SHARED
from frozencore import FrozenCoreConfig, calibrate
from input_files import write_random_llama
from tiny import train_at_random

ENGINES = ROOT / ".engines"
START_S, STOP_S, ANSWER_S = 900, 20, 600


def environment_of(engine: str) -> Path:
    """The engine's environment; the test is skipped where nobody has made one."""
    folder = ENGINES / engine
    if not (folder / ".installed").is_file():
        pytest.skip(f"no {engine} in {folder}: run `make engines`")
    return folder


@dataclass(frozen=True)
class Answer:
    """The tokens that an engine chose greedily, and the log-probability that it gives each of them."""

    tokens: list[int]
    logprobs: list[float]


class RefusedError(Exception):
    """The engine answered with a status that is not 200, and what it said, or ended at its start."""


class EngineProcess:
    """Started in ``with``, up when that returns, gone with all its children after it."""

    def __init__(self, command: Sequence[str | Path], log: Path, settings: Mapping[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.command = [*map(str, command), "--host", "127.0.0.1", "--port", str(self.port)]
        self.log = log
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings}

    def __enter__(self) -> Self:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        try:
            self._until_up()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop()

    def post(self, path: str, body: object) -> Any:
        """The JSON (or text) of the answer.

        Raises:
            RefusedError: Its status is not 200.
        """
        status, text = self._request("POST", path, json.dumps(body))
        if status != 200:
            raise RefusedError(f"{status}: {text}")
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text

    def get(self, path: str) -> str:
        """The text of the answer."""
        status, text = self._request("GET", path, None)
        if status != 200:
            raise RefusedError(f"{status}: {text}")
        return text

    def _request(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _until_up(self) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            if self.process.poll() is not None:
                raise RefusedError(f"ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/health", None)[0] == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{self.command[0]} was not up after {START_S} s: {self.log.read_text()[-3000:]}")

    def _stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # its workers are in the session that it was started with
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads wait for a core that another process holds
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(ENGINES / "vllm" / "cache"),
}


class VllmServer(EngineProcess):
    """``vllm serve`` of a model folder; adapters come and go by name."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        python = environment_of("vllm") / "bin" / "python"  # `vllm serve` asks for a distribution called vllm
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "base"]
        super().__init__([*command, "--dtype", "float32", "--enforce-eager", *flags], log, SETTINGS)

    def load(self, name: str, folder: Path, *, in_place: bool = False) -> None:
        """Take an adapter folder under a name, or in place of the one that has it."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), "load_inplace": in_place})

    def unload(self, name: str) -> None:
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def ask(self, name: str, prompt: list[int], num_tokens: int) -> Answer:
        """Continue a prompt greedily with an adapter, or with ``base``."""
        found: dict[str, Any] = self.post(
            "/v1/completions",
            {"model": name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 1,
             "ignore_eos": True, "return_token_ids": True},
        )["choices"][0]  # fmt: skip
        return Answer(found["token_ids"], found["logprobs"]["token_logprobs"])

    def num_steps(self) -> int:
        """The number of batches that the model has run since the start."""
        found = re.search(r"^vllm:iteration_tokens_total_count\S* (\S+)$", self.get("/metrics"), flags=re.MULTILINE)
        return int(float(found[1]))


# One process for many conversions: importing what the scripts need takes longer than all of them.
CONVERT = """
import json, os, runpy, sys
jobs, results = json.load(sys.stdin), {}
for name, (script, *words) in jobs.items():
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
        results[name] = None
    except BaseException as error:
        results[name] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


def convert(models: Mapping[Path, Path], loras: Mapping[Path, tuple[Path, Path]]) -> dict[Path, str | None]:
    """Run llama.cpp's converters in float32.

    Args:
        models: Model folders by the files to write.
        loras: LoRA directories and their base folders by the files to write.

    Returns:
        For every file, what the converter ended with; None where it was written.
    """
    home = environment_of("llama.cpp")
    said = ["--outtype", "f32", "--outfile"]
    jobs = {
        str(out): [str(home / "src" / "convert_hf_to_gguf.py"), str(folder), *said, str(out)]
        for out, folder in models.items()
    }
    for out, (folder, base) in loras.items():
        script = home / "src" / "convert_lora_to_gguf.py"
        jobs[str(out)] = [str(script), str(folder), "--base", str(base), *said, str(out)]
    command = [home / "bin" / "python", "-c", CONVERT]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(out): reason for out, reason in json.loads(done.stdout.splitlines()[-1]).items()}


class LlamaServer(EngineProcess):
    """``llama-server`` of a gguf file and its adapters, all applied until a request or ``apply`` says others."""

    def __init__(self, model: Path, log: Path, loras: Sequence[Path] = (), *flags: str) -> None:
        program = environment_of("llama.cpp") / "bin" / "llama-server"
        command: list[str | Path] = [program, "--model", model, "--threads", "1", "--parallel", "1"]
        command += ["--ctx-size", "256", "--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
        for lora in loras:
            command += ["--lora", lora]
        super().__init__([*command, *flags], log, {})
        self.loras = list(loras)

    def ask(self, prompt: list[int], num_tokens: int, lora: Path | None = None, *, scale: float = 1.0) -> Answer:
        """Continue a prompt greedily with one of the adapters, or as the server's scales are, to the end of the text
        (which ``ignore_eos`` would forbid)."""
        chosen = {} if lora is None else {"lora": [{"id": self.loras.index(lora), "scale": scale}]}
        found: list[dict[str, Any]] = self.post(
            "/completion",
            {"prompt": prompt, "n_predict": num_tokens, "temperature": -1, "n_probs": 1, "cache_prompt": False}
            | chosen,
        )["completion_probabilities"]  # fmt: skip
        return Answer([token["id"] for token in found], [token["logprob"] for token in found])

    def apply(self, *loras: Path) -> None:
        """Which adapters requests get that ask for none."""
        scales = [{"id": i, "scale": float(lora in loras)} for i, lora in enumerate(self.loras)]
        self.post("/lora-adapters", scales)


PROMPTS = ([1, 403, 407, 261, 378, 432], [1, 270, 379, 285], [1, *range(300, 340)])
NUM_TOKENS, END = 24, 2
TOLERANCE = 1e-4
ALL_LINEAR = "all-linear"
FOR_CORES = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "core", "--max-model-len", "256"]
"""The flags of vLLM for a basis model."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, object]] = {
    "all-linear": {"r": 8, "constructor": "random", "target_modules": ALL_LINEAR},
    "attention": {"r": 8, "constructor": "fcca", "target_modules": ATTENTION},
    "q and v": {"r": 4, "constructor": "random", "target_modules": ["q_proj", "v_proj"], "seed": 1},
    "ragged": {
        "r": 6, "constructor": "random", "target_modules": ALL_LINEAR, "seed": 2, "alpha": 9.0,
        "rank_pattern": {"q_proj": 3, "down_proj": 13}, "alpha_pattern": {"o_proj": 2.0},
    },
}  # fmt: skip


def write_base(folder: Path) -> Path:
    """``tiny1m`` where a checkout has it beside it, or a random model of its shape."""
    if (SHARED / "models" / "tiny1m").is_dir():
        return SHARED / "models" / "tiny1m"
    return write_random_llama(folder)


def load_base(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def write_adapter(base: Path, folder: Path, **options: object) -> Path:
    """A native adapter with cores of random values, saved."""
    model = get_peft_model(load_base(base), FrozenCoreConfig(task_type="CAUSAL_LM", **options))
    if options["constructor"] == "fcca":
        rows = [torch.tensor([prompt]) for prompt in PROMPTS]
        calibrate(model, [{"input_ids": row, "labels": row} for row in rows], progress=False)
    train_at_random(model, size=0.1, seed=int(str(options.get("seed", 0))))
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Referee:
    """Says how far an answer is from float64's."""

    model: nn.Module

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """The log-probabilities of every token of the vocabulary, at the places of ``tokens``."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        return logits.double().log_softmax(-1)

    def greedy(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The tokens that it would have chosen at each place after the same tokens."""
        return self.logprobs(prompt, tokens).argmax(-1).tolist()

    def error(self, prompt: list[int], answer: Answer) -> float:
        """The largest difference of the log-probabilities that an engine gave its tokens."""
        own = self.logprobs(prompt, answer.tokens).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        return float((own - torch.tensor(answer.logprobs, dtype=torch.float64)).abs().max())

    def distance(self, other: Referee, prompt: list[int], tokens: list[int]) -> float:
        """The largest difference of two referees' log-probabilities."""
        return float((self.logprobs(prompt, tokens) - other.logprobs(prompt, tokens)).abs().max())


def worst_error(ask: Callable[[list[int]], Answer], referee: Referee) -> float:
    """The largest error of an adapter's answers; every token must be the referee's."""
    errors = []
    for prompt in PROMPTS:
        answer = ask(prompt)
        assert len(answer.tokens) == NUM_TOKENS or answer.tokens[-1] == END
        assert answer.tokens == referee.greedy(prompt, answer.tokens)
        errors.append(referee.error(prompt, answer))
    return max(errors)


def cores_on(base: nn.Module, **options: object) -> PeftModel:
    """Cores of rank 8 on random bases of every linear layer."""
    plain = {"r": 8, "constructor": "random", "target_modules": ALL_LINEAR}
    return get_peft_model(base, FrozenCoreConfig(task_type="CAUSAL_LM", **(plain | options))).eval()


def native(base: Path, adapter: Path, dtype: torch.dtype = torch.float64) -> Referee:
    """The native adapter on its base."""
    return Referee(PeftModel.from_pretrained(load_base(base), str(adapter)).to(dtype).eval())


def peft_of(base: Path, folder: Path) -> Referee | None:
    """PEFT's model with a directory; None if PEFT cannot load it, or misses factors in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = PeftModel.from_pretrained(load_base(base), str(folder))
        except Exception:  # PEFT raises a dozen kinds
            return None
    if any("missing adapter keys" in str(warning.message) for warning in caught):
        return None
    return Referee(model.double().eval())
