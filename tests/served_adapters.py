"""The inputs of engines: a small model of a shape that they know, prompts, and float64 answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from adapted import train_at_random
from engine_process import Answer
from frozencore import FrozenCoreConfig, calibrate
from places import SHARED
from random_llama import write_random_llama

PROMPTS = ([1, 403, 407, 261, 378, 432], [1, 270, 379, 285], [1, *range(300, 340)])
NUM_TOKENS = 24
TOLERANCE = 1e-4
ALL_LINEAR = "all-linear"
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


def native(base: Path, adapter: Path, dtype: torch.dtype = torch.float64) -> Referee:
    """The native adapter on its base."""
    return Referee(PeftModel.from_pretrained(load_base(base), str(adapter)).to(dtype).eval())
