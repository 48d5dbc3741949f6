"""What transformers' ``Trainer`` is told of a training."""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn
from transformers import TrainingArguments

from frozencore.tune.training.low_rank import optimiser_arguments
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.reporting import ReportedArguments


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
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(recipe.warmup * recipe.num_steps(num_rows)),
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
