"""Train the pocket model from generated text: ``python -m frozencore_lab.pocket.pretrain --out DIR``.

One seeded run on one core: text -> tokenizer -> packed windows -> Qwen2 -> a folder that transformers loads.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from frozencore.errors import TrainingError
from frozencore_lab.pocket.card import model_card
from frozencore_lab.pocket.corpus import documents
from frozencore_lab.pocket.recipe import Pretraining, PretrainingRecipe
from frozencore_lab.pocket.tokens import train_tokenizer

_STEPS_TIMED = 20
_TEXTS_AT_ONCE = 1_000
_LOSSES_AVERAGED = 100


def pocket_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """Qwen2 in miniature: grouped-query attention, biases on q, k and v, tied embeddings."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def corpus_windows(recipe: PretrainingRecipe, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Packed documents, each closed by the end-of-text token: (windows, window) token ids."""
    stream: list[int] = []
    texts = documents(recipe.seed)
    while len(stream) < recipe.num_corpus_tokens:
        for ids in tokenizer(list(islice(texts, _TEXTS_AT_ONCE)))["input_ids"]:
            stream.extend(ids)
            stream.append(tokenizer.eos_token_id)
    num_windows = recipe.num_corpus_tokens // recipe.window
    return torch.tensor(stream[: num_windows * recipe.window]).view(num_windows, recipe.window)


def batches(windows: Tensor, recipe: PretrainingRecipe) -> Iterator[Tensor]:
    """Batches without end, a fresh order in every pass."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        for start in range(0, len(order) - recipe.batch + 1, recipe.batch):
            yield windows[order[start : start + recipe.batch]]


def train_step(model: Qwen2ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], tokens: Tensor) -> float:
    """One update on a batch of windows; returns its mean loss in nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    if not torch.isfinite(loss):
        raise TrainingError(
            f"The pretraining loss must stay finite, but it became {loss.item()}. Lower the learning rate."
        )
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def new_model(
    recipe: PretrainingRecipe, config: Qwen2Config
) -> tuple[Qwen2ForCausalLM, tuple[torch.optim.Optimizer, ...]]:
    """An untrained model and its optimisers, decided by the seed alone.

    Muon reached in two minutes what AdamW alone reached in eight.
    """
    torch.manual_seed(recipe.seed)
    model = Qwen2ForCausalLM(config).train()
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
    return model, (
        torch.optim.Muon(matrices, lr=recipe.lr_matrices, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.lr_rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    )


def steps_in(minutes: float, recipe: PretrainingRecipe, config: Qwen2Config, windows: Tensor) -> int:
    """How many steps this machine does in ``minutes``, measured on a model that is then thrown away."""
    model, optimizers = new_model(recipe, config)
    supply = batches(windows, recipe)
    train_step(model, optimizers, next(supply))
    start = time.perf_counter()
    for _ in range(_STEPS_TIMED):
        train_step(model, optimizers, next(supply))
    return max(1, int(minutes * 60 * _STEPS_TIMED / (time.perf_counter() - start)))


def train(
    recipe: PretrainingRecipe, config: Qwen2Config, windows: Tensor, num_steps: int, progress: Bars
) -> tuple[Qwen2ForCausalLM, Pretraining]:
    """Warm-up, then a cosine to zero over ``num_steps``."""
    model, optimizers = new_model(recipe, config)
    num_warmup = max(1, int(recipe.warmup * num_steps))

    def share_of_peak(step: int) -> float:
        return min((step + 1) / num_warmup, 0.5 * (1 + math.cos(math.pi * step / num_steps)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak) for optimizer in optimizers]
    task = progress.add_task("pretraining", total=num_steps)
    losses: list[float] = []
    start = time.perf_counter()
    for tokens in islice(batches(windows, recipe), num_steps):
        losses.append(train_step(model, optimizers, tokens))
        for schedule in schedules:
            schedule.step()
        recent = losses[-_LOSSES_AVERAGED:]
        progress.update(task, advance=1, description=f"loss {sum(recent) / len(recent):.3f}")
        if not progress.console.is_terminal and len(losses) % 200 == 0:
            progress.console.print(f"step {len(losses)}/{num_steps} loss {sum(recent) / len(recent):.3f}")
    report = Pretraining(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_steps=num_steps,
        num_tokens=num_steps * recipe.batch * recipe.window,
        loss=sum(losses[-_LOSSES_AVERAGED:]) / len(losses[-_LOSSES_AVERAGED:]),
        time_s=time.perf_counter() - start,
    )
    return model.eval(), report


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str, out: Path) -> None:
    """Write the folder beside ``out`` and rename it, so that ``out`` is never half a model."""
    aside = out.with_name(out.name + ".part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "README.md").write_text(card, encoding="utf-8")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    aside.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def pretrain(out: Path, *, recipe: PretrainingRecipe, num_steps: int | None, minutes: float | None) -> Pretraining:
    """Generate, train and save; exactly one of ``num_steps`` and ``minutes`` sets the length."""
    console = Console()
    console.print("training the tokenizer")
    tokenizer = train_tokenizer(islice(documents(recipe.seed), recipe.num_tokenizer_documents))
    console.print(f"{len(tokenizer)} pieces; generating {recipe.num_corpus_tokens:,} tokens")
    windows = corpus_windows(recipe, tokenizer)
    config = pocket_config(tokenizer)
    if num_steps is None:
        num_steps = steps_in(minutes or 0.0, recipe, config, windows)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console) as progress:
        model, report = train(recipe, config, windows, num_steps, progress)
    save(model, tokenizer, model_card(recipe, report), out)
    console.print(f"wrote {out}: {report}")
    return report


def main() -> None:
    """Parse, call, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=3300, help="updates (the shipped model's number by default)")
    length.add_argument("--minutes", type=float, help="instead of --steps: what fits this time on this machine")
    parser.add_argument("--seed", type=int, default=PretrainingRecipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; the shipped model used one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pretrain(
        arguments.out,
        recipe=PretrainingRecipe(seed=arguments.seed),
        num_steps=None if arguments.minutes is not None else arguments.steps,
        minutes=arguments.minutes,
    )


if __name__ == "__main__":
    main()
