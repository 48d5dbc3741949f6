"""The inputs of engines: a small model of a shape that they know, its adapters, prompts, and float64 answers.

Foreign LoRA directories: for each rule of ``frozencore check`` one that breaks it, written by PEFT where PEFT can. What
is right is what PEFT computes with the directory, in float64; where PEFT cannot load all of it, nothing is right.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoHaConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from adapted import train_at_random
from engine_process import Answer, RefusedError
from frozencore import FrozenCoreConfig, calibrate, check_lora_directory
from frozencore.adapter.export.serving import RULES, LoraReport
from input_files import write_random_llama
from places import SHARED

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
