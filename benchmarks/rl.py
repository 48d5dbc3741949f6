"""Which basis does reinforcement learning want? GRPO on the pocket model's word problems, from a half-trained start.

    nice -n 15 python benchmarks/rl.py --folder rl           # goes on where it stopped; figures go to rl/rl.json
    python benchmarks/rl.py --folder rl --quick              # two contestants, one seed, two steps

All weights of the pocket model are first trained on half of the task's rows, but not to the end: this policy answers
some of the questions, and is the base model of every contestant. The reward of a completion is 1 if it is the right
answer, else 0. A step samples 8 completions for each of 4 questions of the other half, at temperature 1. It maximises
the mean of A log π over their tokens. A is the reward minus the mean over the question's completions, divided by their
standard deviation (GRPO, on the policy itself, so without clipping, and without a KL term). FCCA's bases are calibrated
by this loss on rollouts of the start. Each contestant has its own learning rate, searched with another seed and other
questions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from frozencore import FrozenCoreConfig, calibrate
from frozencore.files.whole_file import write_json
from frozencore.tune.rows import TokenRow
from frozencore.tune.run.config import make_config
from frozencore.tune.run.prepare import PreparedRun, prepare
from frozencore.tune.run.provenance import provenance
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import train

TASK, LENGTH, END = "pocket-math", 9, 0
QUESTIONS, SAMPLES = 4, 8
CALIBRATION_BATCHES = 16
SEARCH_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
START = Recipe(learning_rate=1e-3, warmup=0.1, epochs=7, batch_size=16, accumulation=1)
CORES, LORA = (2e-3, 6e-3, 2e-2), (5e-4, 2e-3, 6e-3)


@dataclass(frozen=True)
class Contestant:
    """A contestant, and its learning rates to try."""

    adapter: Callable[[int], Any]
    rates: tuple[float, ...]
    reads_rollouts: bool = False


def _core(constructor: str) -> Callable[[int], Any]:
    return lambda seed: FrozenCoreConfig(r=16, constructor=constructor, seed=seed, task_type="CAUSAL_LM")


def _lora(rank: int) -> Callable[[int], Any]:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return lambda _: LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM")


CONTESTANTS: Mapping[str, Contestant] = {
    "FCCA": Contestant(_core("fcca"), CORES, reads_rollouts=True),
    "LoRA-XS": Contestant(_core("lora_xs"), CORES),
    "MiLoRA": Contestant(_core("milora"), CORES),
    "Random": Contestant(_core("random"), CORES),
    "LoRA r=1": Contestant(_lora(1), LORA),
    "LoRA r=16": Contestant(_lora(16), LORA),
}


@dataclass(frozen=True)
class Plan:
    """The size of the study."""

    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    seeds: tuple[int, ...] = SEEDS
    steps: int = 60
    start: Recipe = START


QUICK = Plan(("FCCA", "LoRA r=1"), SEEDS[:1], 2, replace(START, epochs=1))


@dataclass(frozen=True)
class Questions:
    """Prompts (token ids) and their right completions."""

    rows: Sequence[TokenRow]

    def draw(self, generator: torch.Generator) -> list[TokenRow]:
        places = torch.randperm(len(self.rows), generator=generator)[:QUESTIONS]
        return [self.rows[int(place)] for place in places]


@torch.no_grad()
def rollouts(model: nn.Module, rows: Sequence[TokenRow], generator: torch.Generator | None) -> dict[str, Tensor]:
    """``SAMPLES`` completions of each row's prompt (one, the likeliest, without a generator), side by side.

    ``labels`` are those of the completion tokens, the end token included, -100 elsewhere; ``rewards`` (b,).
    """
    rows = [row for row in rows for _ in range(SAMPLES if generator else 1)]
    width = max(row.num_context for row in rows)
    prompts = torch.tensor([[END] * (width - row.num_context) + list(row.input_ids[: row.num_context]) for row in rows])
    mask = torch.tensor([[0] * (width - row.num_context) + [1] * row.num_context for row in rows])
    places = (mask.cumsum(1) - 1).clamp_min(0)
    ids, cache, running = prompts, None, torch.ones(len(rows), dtype=torch.long)
    came: list[Tensor] = []
    shown: list[Tensor] = [mask]
    while len(came) < LENGTH and bool(running.any()):
        attention = torch.cat(shown, dim=1)
        out = model(ids, attention_mask=attention, position_ids=places, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        chosen = logits.argmax(-1) if generator is None else torch.multinomial(
            logits.softmax(-1), 1, generator=generator
        )[:, 0]  # fmt: skip
        came.append(chosen.masked_fill(running == 0, END))
        shown.append(running[:, None])
        running = running * (chosen != END)
        ids, places = chosen[:, None], places[:, -1:] + 1
    completions, counted = torch.stack(came, dim=1), torch.cat(shown[1:], dim=1)
    right = [list(row.input_ids[row.num_context :]) for row in rows]
    rewards = torch.tensor([
        float([int(t) for t, c in zip(own, kept, strict=True) if c] == answer)
        for own, kept, answer in zip(completions, counted, right, strict=True)
    ])  # fmt: skip
    labels = torch.cat([torch.full_like(prompts, -100), completions.masked_fill(counted == 0, -100)], dim=1)
    return {
        "input_ids": torch.cat([prompts, completions], dim=1),
        "attention_mask": torch.cat([mask, counted], dim=1),
        "labels": labels,
        "rewards": rewards,
    }


def policy_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """``-mean(A log π)`` over the completion tokens, A the rewards less and over what a question's others say."""
    groups = batch["rewards"].view(-1, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    mask = batch["attention_mask"]
    places = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=batch["input_ids"], attention_mask=mask, position_ids=places).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    log_likelihood = -nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return -(advantages[:, None] * log_likelihood).sum() / (labels != -100).sum()


def reward_of(model: nn.Module, rows: Sequence[TokenRow], seed: int) -> dict[str, float]:
    """Mean reward of sampled completions, and of the likeliest ones."""
    generator = torch.Generator().manual_seed(seed)
    parts = [rows[i : i + 40] for i in range(0, len(rows), 40)]
    model.eval()
    sampled = torch.cat([rollouts(model, part, generator)["rewards"] for part in parts])
    likeliest = torch.cat([rollouts(model, part, None)["rewards"] for part in parts])
    return {"sampled": float(sampled.mean()), "likeliest": float(likeliest.mean())}


def reinforce(
    model: nn.Module, questions: Questions, rate: float, steps: int, generator: torch.Generator
) -> Iterator[float]:
    """Train in place; the mean reward of each step's rollouts."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 6)
        batch = rollouts(model, questions.draw(generator), generator)
        policy_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(batch["rewards"].mean())


def one_run(
    name: str, rate: float, seed: int, steps: int, start: Path, rows: Mapping[str, Sequence[TokenRow]]
) -> dict[str, Any]:
    """A contestant's training and what it is worth."""
    contestant, began = CONTESTANTS[name], time.process_time()
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(start), contestant.adapter(seed))
    generator, questions = torch.Generator().manual_seed(seed), Questions(rows["questions"])
    if contestant.reads_rollouts:
        with model.disable_adapter():
            seen = [rollouts(model, questions.draw(generator), generator) for _ in range(CALIBRATION_BATCHES)]
        calibrate(model, seen, loss_fn=policy_loss, progress=False)
    curve = list(reinforce(model, questions, rate, steps, generator))
    return {
        "contestant": name, "rate": rate, "seed": seed,
        "values": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "curve": [round(reward, 4) for reward in curve],
        "validation": reward_of(model, rows["validation"], seed), "held_out": reward_of(model, rows["held_out"], seed),
        "processor_s": round(time.process_time() - began, 1),
    }  # fmt: skip


def make_start(folder: Path, prepared: PreparedRun, rows: Sequence[TokenRow], recipe: Recipe) -> None:
    """The half-trained policy, unless it is there."""
    if not (folder / "config.json").exists():
        train(prepared.model, rows, recipe, pad_id=prepared.encoder.pad_id)
        prepared.model.save_pretrained(folder)


def study(plan: Plan, folder: Path) -> None:
    """Every run of the plan that the folder does not hold; its ``rl.json`` is whole after each."""
    prepared = prepare(make_config(model="pocket", task=TASK, paper_steps=True, device="cpu"), lambda *_: None)
    half, start, results = len(prepared.rows.train) // 2, folder / "start", folder / "rl.json"
    make_start(start, prepared, prepared.rows.train[:half], plan.start)
    others = prepared.rows.train[half:]
    rows = {"questions": others[:-64], "validation": others[-64:], "held_out": prepared.rows.held_out}
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"search": [], "runs": []}
    if "start" not in known:
        policy = AutoModelForCausalLM.from_pretrained(start)
        known["start"] = {name: reward_of(policy, rows[name], SEARCH_SEED) for name in ("validation", "held_out")}
        known["setting"] = {
            "task": TASK, "questions": len(rows["questions"]), "held_out": len(rows["held_out"]), "steps": plan.steps,
            "rollouts": QUESTIONS * SAMPLES, "start_rows": half, "start_epochs": plan.start.epochs,
        }  # fmt: skip
    known["provenance"] = provenance()

    def take(kind: str, name: str, rate: float, seed: int) -> None:
        done = [(run["contestant"], run["rate"], run["seed"]) for run in known[kind]]
        if (name, rate, seed) not in done:
            known[kind].append(one_run(name, rate, seed, plan.steps, start, rows))
            write_json(results, known)
            run = known[kind][-1]
            print(kind, name, rate, seed, run["held_out"], f"{run['processor_s']} s", flush=True)

    for name in plan.contestants:
        for rate in CONTESTANTS[name].rates:
            take("search", name, rate, SEARCH_SEED)
    for seed in plan.seeds:
        for name in plan.contestants:
            take("runs", name, chosen_rate(known, name), seed)


def chosen_rate(known: Mapping[str, Any], name: str) -> float:
    """The rate whose search run has the highest mean reward of sampled answers on the validation questions."""
    tried = [run for run in known["search"] if run["contestant"] == name]
    return float(max(tried, key=lambda run: run["validation"]["sampled"])["rate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="Of the start and the results.")
    parser.add_argument("--quick", action="store_true", help="See that it runs.")
    options = parser.parse_args()
    study(QUICK if options.quick else Plan(), options.folder)


if __name__ == "__main__":
    main()
