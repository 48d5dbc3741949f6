"""GRPO with TRL and vLLM: at every step the core enters the running engine from memory, then vLLM samples.

    frozencore calibrate --model DIR --data rows.jsonl --out shop
    frozencore export shop/basis --to basis-model --base DIR --out shop/model
    python examples/grpo_vllm.py --model DIR --data questions.jsonl --basis shop/basis --engine shop/model --output out

Needs TRL, PEFT and vLLM in one environment. ``questions.jsonl`` holds one ``{"prompt": ..., "answer": ...}`` a line; a
completion is worth 1 if it begins with the answer. What is sent each step is r x r numbers a layer, and no file is
written. The engine's model holds P and Q; it is made once from the basis on which the core trains.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from frozencore import FrozenCoreConfig, tenant_weights

POLICY = LoRARequest("policy", 1, "memory")


class Rollouts:
    """Completions for TRL: the core goes into the engine, and the engine samples."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.engine = LLM(
            str(options.engine), enable_lora=True, max_lora_rank=options.rank, lora_target_modules=["core"],
            worker_extension_cls="frozencore_vllm.TenantWorker", max_num_seqs=options.rollouts,
            max_model_len=options.max_length, dtype=options.dtype, enforce_eager=True, seed=0,
            gpu_memory_utilization=options.engine_memory,
        )  # fmt: skip
        self.sync_s: list[float] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        begins = perf_counter()
        weights = tenant_weights(trainer.accelerator.unwrap_model(trainer.model))
        self.engine.collective_rpc("put_tenant", args=(POLICY.lora_int_id, weights))
        self.engine.reset_prefix_cache()
        self.sync_s.append(perf_counter() - begins)
        sampling = SamplingParams(temperature=1.0, max_tokens=trainer.args.max_completion_length, logprobs=0)
        answers = self.engine.generate(prompts, sampling, lora_request=POLICY, use_tqdm=False)
        completions = [answer.outputs[0] for answer in answers]
        logprobs = [
            [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in completions
        ]
        return {
            "prompt_ids": [answer.prompt_token_ids for answer in answers],
            "completion_ids": [list(one.token_ids) for one in completions],
            "logprobs": logprobs,
        }


def begins_with_the_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip().startswith(right.strip())) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    options = parse()
    rollouts = Rollouts(options)
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model),
        reward_funcs=begins_with_the_answer,
        args=GRPOConfig(
            str(options.output / "trainer"), learning_rate=options.learning_rate, max_steps=options.steps,
            per_device_train_batch_size=options.rollouts, num_generations=8, logging_steps=1, report_to="none",
            max_completion_length=options.max_new_tokens, save_strategy="no", use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=load_dataset("json", data_files=str(options.data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=FrozenCoreConfig(basis=str(options.basis), task_type="CAUSAL_LM"),
        rollout_func=rollouts,
    )  # fmt: skip
    trainer.train()
    trainer.model.save_pretrained(options.output / "adapter")
    print(
        f"The core entered the engine {len(rollouts.sync_s)} times, in {1e3 * median(rollouts.sync_s):.1f} ms (median)."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of a causal language model.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt and answer.")
    parser.add_argument("--basis", type=Path, required=True, help="Folder of a basis of this model.")
    parser.add_argument("--engine", type=Path, required=True, help="Folder of the basis model made from it.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16, help="The largest rank of the basis.")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=32, help="In a step; 8 of each question.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512, help="Of prompt and completion, in the engine.")
    parser.add_argument("--dtype", default="auto", help="Of the engine's weights.")
    parser.add_argument("--engine-memory", type=float, default=0.4, help="Share of the memory that the engine takes.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
