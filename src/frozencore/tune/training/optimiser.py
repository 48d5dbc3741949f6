"""What the Trainer is told, and the optimizers whose state has a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from frozencore.tune.training.recipe import PLAIN, Recipe
from frozencore.tune.training.reporting import ReportedArguments

OPTIONS = {
    "galore_adamw": "scale=0.25",  # the paper's
    "apollo_adamw": "scale=1.0, proj=random, scale_type=channel",
}
"""Beside rank and gap, by the name that transformers gives the optimiser."""
PROJECTORS = {
    "galore_adamw": ("galore_torch.galore_projector", "GaLoreProjector"),
    "apollo_adamw": ("apollo_torch.random_projector", "GradientProjector"),
}


def optimiser_arguments(
    model: nn.Module, optimiser: str, rank: int | None, num_steps: int, rounds: int
) -> dict[str, Any]:
    """What ``TrainingArguments`` are told.

    Args:
        rounds: How often the directions are chosen in ``num_steps`` optimiser steps.
    """
    if optimiser == PLAIN:
        return {"optim": optimiser}
    trained = (name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2)
    gap = math.ceil(num_steps / rounds)
    return {
        "optim": optimiser,
        "optim_target_modules": [name.removesuffix(".weight") for name in trained],
        "optim_args": f"rank={rank}, update_proj_gap={gap}, {OPTIONS[optimiser]}",
    }


@contextmanager
def readable_state(optimiser: str) -> Iterator[None]:
    """The directions are objects of the optimiser's own in a checkpoint, which torch reads where they are named."""
    if optimiser == PLAIN:
        yield
        return
    module, name = PROJECTORS[optimiser]
    with torch.serialization.safe_globals([getattr(import_module(module), name)]):
        yield


def training_arguments(
    model: nn.Module,
    recipe: Recipe,
    own: Recipe,
    num_rows: int,
    folder: Path,
    saves: bool,
    checkpoint_steps: int | None,
) -> TrainingArguments:
    """The recipe in transformers' words.

    Args:
        own: What this process does of it.
        folder: For checkpoints, where ``saves``: one every ``checkpoint_steps``, or an epoch.
    """
    arguments = ReportedArguments(
        output_dir=str(folder),
        learning_rate=recipe.learning_rate,
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=own.batch_size,
        gradient_accumulation_steps=own.accumulation,
        max_grad_norm=recipe.max_grad_norm if recipe.private is None else 0.0,  # each row's gradient is cut instead
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        data_seed=recipe.seed,
        save_strategy="no" if not saves else "epoch" if checkpoint_steps is None else "steps",
        save_steps=checkpoint_steps or 1,
        save_total_limit=2,  # the newest may be half-written
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        use_cpu=next(model.parameters()).device.type == "cpu",
        **optimiser_arguments(
            model,
            recipe.optimiser,
            recipe.optimiser_rank,
            recipe.num_steps(num_rows),
            1 if recipe.refresh == "auto" else recipe.refresh,
        ),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several devices go through accelerate; DataParallel would multiply the batch
    return arguments
