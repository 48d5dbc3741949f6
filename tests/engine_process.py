"""vLLM and llama.cpp as processes of their own, in their own environments (``make engines``), asked over HTTP."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from places import ROOT

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
