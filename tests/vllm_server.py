"""vLLM's OpenAI-compatible server on this machine's CPU, in float32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engine_process import ENGINES, Answer, EngineProcess, environment_of

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
        assert found is not None
        return int(float(found[1]))
