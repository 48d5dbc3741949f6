"""One vLLM engine that benchmarks/served.py drives: a line of JSON in, a line of JSON out. Runs in vLLM's environment.

Needs nothing of frozencore but its plugin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the worker is asked how large its slots are

import psutil
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def slot_bytes(worker: Any) -> int:
    """The bytes of all tensors that the engine's LoRA layers hold for their slots."""
    manager = worker.model_runner.lora_manager._adapter_manager
    stacks = {  # slots for cores are both
        stack.data_ptr(): stack
        for module in manager.modules.values()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for stack in getattr(module, name)
    }
    return sum(stack.numel() * stack.element_size() for stack in stacks.values())


def processor_s() -> float:
    """The processor seconds of this process and its children, the engine's core and its worker."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def timed(call: Callable[..., object], each: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The seconds of every call by the clock, and the processor seconds of one on average."""
    times, used = [], processor_s()
    for given in each:
        begins = time.perf_counter()
        call(*given)
        times.append(time.perf_counter() - begins)
    return {"load_s": times, "processor_s": (processor_s() - used) / len(times)}


class Engine:
    """Answers to the words of the driver."""

    def __init__(
        self, model: str, slots: int, rank: int, rows: int, targets: list[str] | None, known: int | None = None
    ) -> None:
        self.slots = slots
        self.adapters: list[LoRARequest] = []
        lora: dict[str, Any] = {}
        if slots:
            lora = {
                "enable_lora": True, "max_loras": slots, "max_cpu_loras": known or slots, "max_lora_rank": rank,
                "lora_target_modules": targets,
            }  # fmt: skip
        if targets == ["core"]:
            lora["worker_extension_cls"] = "frozencore_vllm.TenantWorker"
        self.llm = LLM(
            model, dtype="float32", enforce_eager=True, max_num_seqs=rows, max_model_len=128,
            enable_prefix_caching=False, skip_tokenizer_init=True, gpu_memory_utilization=0.2, **lora,
        )  # fmt: skip

    def slot(self) -> dict[str, Any]:
        return {"slot_bytes": self.llm.collective_rpc(slot_bytes)[0] / self.slots}

    def load(self, folders: list[str]) -> dict[str, Any]:
        """Seconds for each adapter to enter a slot, by the clock; processor seconds on average."""
        first = len(self.adapters) + 1
        new = [LoRARequest(folder, first + i, folder) for i, folder in enumerate(folders)]
        self.adapters += new
        return timed(self.llm.llm_engine.add_lora, [(adapter,) for adapter in new])

    def put(self, files: list[str]) -> dict[str, Any]:
        """The same for tenants whose weights are in memory; their numbers follow those that are loaded."""
        weights = [Path(file).read_bytes() for file in files]
        first = len(self.adapters) + 1
        self.adapters += [LoRARequest(file, first + i, "memory") for i, file in enumerate(files)]
        return timed(self._put, list(enumerate(weights, first)))

    def _put(self, number: int, weights: bytes) -> None:
        self.llm.collective_rpc("put_tenant", args=(number, weights))

    def first(self, places: list[str], prompt: list[int]) -> dict[str, Any]:
        """Seconds by the clock from a new adapter, in a folder or in memory, to its first token, for each of them."""
        number, taken = len(self.adapters), []
        for place in places:
            number += 1
            weights = None if Path(place).is_dir() else Path(place).read_bytes()
            begins = time.perf_counter()
            if weights is not None:
                self._put(number, weights)
            self.llm.generate(
                {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1, detokenize=False),
                lora_request=LoRARequest(f"new {number}", number, place), use_tqdm=False,
            )  # fmt: skip
            taken.append(time.perf_counter() - begins)
        return {"clock_s": taken}

    def generate(
        self, prompts: list[list[int]], num_tokens: int, tenants: int, first: int = 0, bare: int = 0
    ) -> dict[str, Any]:
        """Seconds for all prompts, of processors and by the clock, and the tokens.

        No tenants is no adapter; the first ``bare`` rows of a batch have none either.
        """
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        each = [self.adapters[first + i % tenants] for i in range(len(prompts))] if tenants else None
        if each:
            each[:bare] = [None] * bare
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        begins, used = time.perf_counter(), processor_s()
        answers = self.llm.generate(rows, sampling, lora_request=each, use_tqdm=False)
        taken = {"clock_s": time.perf_counter() - begins, "processor_s": processor_s() - used}
        return {**taken, "tokens": [list(answer.outputs[0].token_ids) for answer in answers]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    engine: Engine | None = None
    for line in sys.stdin:
        word, given = json.loads(line)
        if word == "start":
            engine, found = Engine(**given), {}
        else:
            found = getattr(engine, word)(**given)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
