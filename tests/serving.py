"""Engines and what they serve: vLLM and llama.cpp as processes of their own, in the environments of ``make engines``,
asked over HTTP; a small model of a shape that they know, its adapters, prompts, and float64 answers.

Foreign LoRA directories: for each rule of ``frozencore check`` one that breaks it, written by PEFT where PEFT can. What
is right is what PEFT computes with the directory, in float64; where PEFT cannot load all of it, nothing is right.
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
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fixtures import ROOT, SHARED
from frozencore import FrozenCoreConfig, calibrate, check_lora_directory
from frozencore.adapter.export.serving import RULES, LoraReport
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


Tensors = dict[str, Tensor]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.1.mlp.down_proj"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INVOCATION = [407, 261]  # in the middle of the first prompt


def by_peft(base: Path, folder: Path, config: PeftConfig) -> None:
    """Save an adapter that changes the model, as PEFT does."""
    model = get_peft_model(load_base(base), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or "hada" in name or "modules_to_save" in name):
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


def lora(**options: Any) -> Callable[[Path, Path], None]:
    chosen = {"r": 8, "lora_alpha": 16, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}
    return lambda base, folder: by_peft(base, folder, LoraConfig(**chosen))


def changed(change: Callable[[dict[str, Any], Tensors], object]) -> Callable[[Path, Path], None]:
    """A plain LoRA of PEFT, changed by hand."""

    def write(base: Path, folder: Path) -> None:
        lora()(base, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        change(config, tensors)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")

    return write


def with_file(name: str) -> Callable[[Path, Path], None]:
    def write(base: Path, folder: Path) -> None:
        lora()(base, folder)
        (folder / name).write_text("{}")

    return write


def without(*parts: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        for key in [key for key in tensors if any(part in key for part in parts)]:
            del tensors[key]

    return change


def of_rank(rank: int) -> Callable[[dict[str, Any], Tensors], None]:
    def change(_: dict[str, Any], tensors: Tensors) -> None:
        for side, shape in (("A", (rank, 128)), ("B", (128, rank))):
            tensors[f"{Q}.lora_{side}.weight"] = torch.full(shape, 0.01)

    return change


# One rule may have several; the first part of a name is the rule's. "none" breaks no rule.
DIRECTORIES: dict[str, Callable[[Path, Path], None]] = {
    "none: plain": lora(),
    "none: negative alpha": lora(lora_alpha=-8),
    "none: half precision": changed(
        lambda _, tensors: tensors.update({key: X.to(torch.float16) for key, X in tensors.items()})
    ),
    "is_lora": lambda base, folder: by_peft(base, folder, LoHaConfig(r=4, target_modules=["q_proj"])),
    "rank_is_positive": changed(lambda config, _: config.update(r=0)),
    "rank_fits_vllm": lora(r=513, target_modules=["q_proj", "k_proj", "v_proj"]),
    "alpha_is_a_number: none": changed(lambda config, _: config.update(lora_alpha=None)),
    "alpha_is_not_zero": lora(lora_alpha=0),
    "one_alpha": lora(alpha_pattern={"q_proj": 4, "down_proj": 40}),
    "one_rank": lora(rank_pattern={"q_proj": 3, "layers.1.mlp.down_proj": 13}),
    "plain_scale": lora(use_rslora=True),
    "no_dora": lora(use_dora=True),
    "no_bias": lora(bias="all"),
    "no_whole_modules": lora(modules_to_save=["lm_head"]),
    "plain_start": lora(init_lora_weights="pissa"),
    "targets_listed": lora(target_modules=r".*\.(q|k|v)_proj"),
    "targets_known_to_sglang": changed(lambda config, _: config["target_modules"].append("fc1")),
    "targets_name_all": lora(target_modules=["q_proj", "k_proj", "v_proj"], target_parameters=["mlp.down_proj.weight"]),
    "no_variant: layer_replication": lora(layer_replication=[[0, 3], [2, 4]]),
    "no_variant: lora_bias": lora(lora_bias=True),
    "no_activation": lora(alora_invocation_tokens=INVOCATION),
    "no_added_tokens": with_file("added_tokens.json"),
    "some_factors": changed(lambda _, tensors: tensors.clear()),
    "only_factors": changed(lambda _, tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.ones(128)})),
    "factors_in_pairs: no B": changed(without("layers.1.mlp.down_proj.lora_B")),
    "factors_in_pairs: no A": changed(without("layers.1.mlp.down_proj.lora_A")),
    "factors_fit": changed(lambda _, tensors: tensors.update({f"{Q}.lora_B.weight": torch.full((128, 4), 0.01)})),
    "ranks_are_r: lower": changed(of_rank(5)),
    "ranks_are_r: higher": changed(of_rank(12)),
    "packed_qkv: q": lora(target_modules=["q_proj"]),
    "packed_qkv: q and k": lora(target_modules=["q_proj", "k_proj"]),
    "packed_gate_up": lora(target_modules=["up_proj"]),
    "types_are_plain: int8": changed(
        lambda _, tensors: tensors.update({f"{DOWN}.lora_A.weight": torch.ones(8, 352, dtype=torch.int8)})
    ),
    "types_are_plain: float64": changed(
        lambda _, tensors: tensors.update({f"{Q}.lora_A.weight": tensors[f"{Q}.lora_A.weight"].double()})
    ),
    "types_are_plain: float8": changed(
        lambda _, tensors: tensors.update({f"{Q}.lora_A.weight": tensors[f"{Q}.lora_A.weight"].to(torch.float8_e4m3fn)})
    ),
    "all_finite": changed(lambda _, tensors: tensors[f"{Q}.lora_A.weight"].fill_(torch.nan)),
}

ELSEWHERE = {"no_conv1d", "no_tenant"}  # about other kinds of model, of which engines are asked by tests of their own


@dataclass(frozen=True)
class ForeignLora:
    """A directory, what ``frozencore check`` says of it, and what PEFT makes of it (None if it cannot load it)."""

    folder: Path
    report: LoraReport
    peft: Referee | None


def write_foreign_loras(base: Path, folder: Path) -> dict[str, ForeignLora]:
    """All of them; each must break the rule that it is named after."""
    found = {}
    for number, (name, write) in enumerate(DIRECTORIES.items()):
        own = folder / str(number)
        write(base, own)
        found[name] = ForeignLora(own, check_lora_directory(own), peft_of(base, own))
        rule, broken = name.partition(":")[0], {problem.rule for problem in found[name].report.problems}
        assert rule in broken or (rule == "none" and not broken), (name, broken)
    assert {name.partition(":")[0] for name in found} == {rule.name for rule in RULES} - ELSEWHERE | {"none"}
    return found


def serves_right(ask: Callable[[list[int]], Answer], lora: ForeignLora) -> bool:
    """Whether an engine answers as PEFT does with a directory that it took."""
    if lora.peft is None:
        return False
    for prompt in PROMPTS[:2]:
        try:
            answer = ask(prompt)
        except RefusedError:
            return False
        if answer.tokens != lora.peft.greedy(prompt, answer.tokens) or lora.peft.error(prompt, answer) > TOLERANCE:
            return False
    return True


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
