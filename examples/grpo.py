"""Reinforcement learning: GRPO with TRL on a frozen core, its bases of rollouts weighted by their advantages.

    python examples/grpo.py --model DIR --data questions.jsonl --output out

``questions.jsonl`` holds one ``{"prompt": ..., "answer": ...}`` a line; a completion is worth 1 if it begins with the
answer. The bases come from the policy gradient itself: before training the loss's gradient is that of E[A log π].
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from frozencore import FrozenCoreConfig, calibrate


def begins_with_the_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip().startswith(right.strip())) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    options = parse()
    arguments = GRPOConfig(
        str(options.output / "trainer"), learning_rate=options.learning_rate, max_steps=options.steps,
        per_device_train_batch_size=options.rollouts, num_generations=8, max_completion_length=options.max_new_tokens,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model),
        reward_funcs=begins_with_the_answer,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(options.data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=FrozenCoreConfig(r=options.rank, constructor=options.constructor, task_type="CAUSAL_LM"),
    )
    if options.constructor not in ("random", "vera", "lora_xs", "milora"):  # these read no data
        prompts = islice(trainer.get_train_dataloader(), options.calibration_batches)
        with trainer.model.disable_adapter():  # which has no bases yet: the policy is the base model
            rollouts = [trainer._generate_and_score_completions(batch) for batch in prompts]
        calibrate(trainer.model, rollouts, loss_fn=trainer.compute_loss)
        trainer._metrics["train"].clear()  # those of these rollouts, which the first log would hold
    trainer.train()
    trainer.model.save_pretrained(options.output / "adapter")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or hub id of a causal language model.")
    parser.add_argument("--data", type=Path, required=True, help="JSONL with prompt and answer.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--constructor", default="fcca")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=32, help="In a step; 8 of each question.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--calibration-batches", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
