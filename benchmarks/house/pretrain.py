"""Pretrain the house model: a small Qwen2 that has read the corpus and nothing else.

    python benchmarks/house/pretrain.py --out runs/house              # on a GPU: ten passes or nine minutes
    python benchmarks/house/pretrain.py --out runs/house --resume     # goes on where the last checkpoint was written

Weights and AdamW are float32; on CUDA the products are bfloat16. README.md beside this file says what is written.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from frozencore.whole_file import whole_file, write_lines
from measures import channel_spread, held_out_loss, held_out_rows, mixed
from packed_text import PackedText, Rows, packed_text
from recipe import Recipe, flops_per_token, new_model, num_parameters
from saved_model import card_of, licences_of, save_model

BETAS, WEIGHT_DECAY, LONGEST_GRADIENT = (0.9, 0.95), 0.1, 1.0
WARM_UP = 100  # steps, or a tenth of them where they are few
LAST_RATE = 0.02  # of the highest
ASSUMED_FLOPS = 100e12  # an eighth of what an H200 reaches in large bfloat16 products: these are small ones


@dataclass
class Run:
    """A model in training: what a checkpoint holds."""

    recipe: Recipe
    model: Qwen2ForCausalLM
    optimiser: torch.optim.AdamW
    step: int
    elapsed_s: float
    history: list[dict[str, Any]]

    @classmethod
    def new(cls, recipe: Recipe, device: torch.device) -> Run:
        model = new_model(recipe).to(device)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        return cls(recipe, model, torch.optim.AdamW(groups, betas=BETAS, fused=True), 0, 0.0, [])

    @property
    def device(self) -> torch.device:
        return self.model.device

    def save(self, path: Path) -> None:
        """Write the checkpoint, whole or not at all."""
        parts = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        rest = {"recipe": asdict(self.recipe), "step": self.step, "elapsed_s": self.elapsed_s, "history": self.history}
        with whole_file(path) as aside:
            torch.save(parts | rest, aside)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            SystemExit: It was made under another recipe.
        """
        saved = torch.load(path, map_location=self.device, weights_only=True)
        ours = asdict(self.recipe)
        if other := [f"{name} {saved['recipe'].get(name)}" for name in ours if saved["recipe"].get(name) != ours[name]]:
            raise SystemExit(f"{path} was made with {', '.join(other)}. Resume with the same, or choose another --out.")
        self.model.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step, self.elapsed_s, self.history = saved["step"], saved["elapsed_s"], saved["history"]


def train(run: Run, text: PackedText, out: Path, *, seconds: float = math.inf, compiled: bool = False) -> None:
    """Take the steps that are left, and write checkpoint and history every ``recipe.every`` of them and at the end.

    Args:
        seconds: Of training, earlier sittings included: the cosine runs by steps or by time, whichever is further on.
    """
    recipe, model = run.recipe, run.model
    rows = Rows(text.train, recipe.rows, recipe.length, recipe.seed)
    num_steps = math.ceil(recipe.passes * rows.steps_per_pass)
    held_out = held_out_rows(text.valid, recipe.held_out_rows, recipe.length)
    warm_up = min(WARM_UP, max(1, num_steps // 10))
    learner = torch.compile(model) if compiled else model
    parameters = list(model.parameters())
    start, last_step, last_s = time.perf_counter() - run.elapsed_s, run.step, run.elapsed_s
    losses: list[Tensor] = []
    done = max(run.step / num_steps, run.elapsed_s / seconds)
    if not run.history:
        record(run, out, held_out, rate=0.0, train_loss=None, tokens_per_s=None)
    model.train()
    while done < 1:
        rate = recipe.rate * min(1.0, (run.step + 1) / warm_up) * cosine(done)
        for group in run.optimiser.param_groups:
            group["lr"] = rate
        ids = rows.batch(run.step).to(run.device)
        with mixed(run.device):
            loss = learner(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, LONGEST_GRADIENT)
        run.optimiser.step()
        run.optimiser.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        run.step += 1
        if run.step % 8 == 0:
            loss.item()  # the host must not run ahead of the device, or it would learn of the time too late
        run.elapsed_s = time.perf_counter() - start
        done = max(run.step / num_steps, run.elapsed_s / seconds)
        if done >= 1 or run.step % recipe.every == 0:
            mean = float(torch.stack(losses).mean())
            run.elapsed_s = time.perf_counter() - start
            speed = (run.step - last_step) * recipe.rows * recipe.length / (run.elapsed_s - last_s)
            record(run, out, held_out, rate=rate, train_loss=mean, tokens_per_s=speed)
            run.elapsed_s = time.perf_counter() - start
            losses, last_step, last_s = [], run.step, run.elapsed_s
            model.train()


def cosine(done: float) -> float:
    """Share of the highest rate, from 1 down to ``LAST_RATE``."""
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def record(
    run: Run, out: Path, held_out: Tensor, *, rate: float, train_loss: float | None, tokens_per_s: float | None
) -> None:
    """Measure the model on held-out text, then write history and checkpoint."""
    run.model.eval()
    entry = {
        "step": run.step,
        "tokens": run.step * run.recipe.rows * run.recipe.length,
        "elapsed_s": round(run.elapsed_s, 1),
        "tokens_per_s": tokens_per_s and round(tokens_per_s),
        "rate": rate,
        "train_loss": train_loss,
        "held_out_loss": held_out_loss(run.model, held_out, at_once=run.recipe.rows),
        "spread": channel_spread(run.model, held_out),
    }
    run.history.append(entry)
    inputs, errors = (max(layer[side] for layer in entry["spread"].values()) for side in ("inputs", "errors"))
    print(
        f"step {run.step}  {entry['elapsed_s']} s  {entry['tokens_per_s'] or 0} tokens/s  train {train_loss or 0:.4f}  "
        f"held out {entry['held_out_loss']:.4f}  widest spread: inputs {inputs:.1f}, errors {errors:.1f}",
        flush=True,
    )
    write_lines(out / "history.jsonl", run.history)
    run.save(out / "checkpoint.pt")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(__file__).parents[3] / "shared" / "corpus")
    parser.add_argument("--out", type=Path, default=Path("runs/house"))
    parser.add_argument("--minutes", type=float, default=9.0, help="in all, preparation included; 0: no limit")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint in --out, if one is there")
    parser.add_argument("--prepare", action="store_true", help="make tokenizer and tokens, print the estimate, end")
    parser.add_argument("--compile", action="store_true", help="torch.compile the steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shard-size", default="5GB", help="largest weight file of the saved model")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    start = time.perf_counter()
    asked = options()
    recipe = Recipe(**{name: getattr(asked, name) for name in asdict(Recipe())})
    licences = licences_of(asked.corpus)
    checkpoint = asked.out / "checkpoint.pt"
    if checkpoint.exists() and not asked.resume:
        raise SystemExit(f"{checkpoint} is there. Go on with it (--resume), or choose another --out.")
    text = packed_text(asked.corpus, asked.out / "tokens", vocabulary=recipe.vocabulary)
    run = Run.new(recipe, torch.device(asked.device))
    each, all_tokens = flops_per_token(run.model, recipe), recipe.passes * len(text.train)
    print(
        f"{num_parameters(run.model):,} parameters; {len(text.train):,} tokens, {len(text.valid):,} held out. "
        f"{each / 1e6:.0f} MFLOP a token x {all_tokens / 1e6:.0f} M tokens / {ASSUMED_FLOPS / 1e12:.0f} TFLOP/s "
        f"(assumed, one H200) = {each * all_tokens / ASSUMED_FLOPS / 60:.1f} minutes",
        flush=True,
    )
    if asked.prepare:
        return
    if asked.resume and checkpoint.exists():
        run.load(checkpoint)
    seconds = 60 * asked.minutes - (time.perf_counter() - start) if asked.minutes else math.inf
    if seconds <= 0:
        raise SystemExit(f"Preparing took all of --minutes {asked.minutes:g}. Its files are kept: run again.")
    train(run, text, asked.out, seconds=seconds, compiled=asked.compile)
    weights, last = num_parameters(run.model), run.history[-1]
    card = card_of(recipe, last, num_weights=weights, num_tokens=len(text.train), licences=licences)
    save_model(run.model, text, asked.out / "model", card=card, shard_size=asked.shard_size)


if __name__ == "__main__":
    main()
