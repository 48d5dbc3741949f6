"""Train by the recipe on transformers' ``Trainer`` (paper, appendix "Complete Experimental Protocol").

AdamW without weight decay over the trainable parameters, cosine schedule with warm-up, gradients clipped at 1, no
dropout. The loss is the mean over the completion tokens of one optimizer step. Splitting a step into batches changes
speed and memory, not the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from frozencore.attributes import with_attributes
from frozencore.calibration.preserve import own_random_state, without_randomness
from frozencore.distributed import broadcast_from_rank0, num_ranks, wait_for_all
from frozencore.errors import ConfigError, TrainingError
from frozencore.progress import Progress, no_progress
from frozencore.tune.record import SelectedCheckpoint, TrainedSteps
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator
from frozencore.tune.training.callbacks import (
    EndedEarly,
    LossMonitor,
    Saving,
    Selection,
    is_patience_lost,
    scores_in,
    selected,
    training_state_held,
)
from frozencore.tune.training.checkpoints import Stop, defer_stop, explain_disk_errors, starting_point
from frozencore.tune.training.recipe import Recipe, training_arguments
from frozencore.tune.training.trainer import (
    CompletionTrainer,
    GroupingCollator,
    RowCollator,
    adapters_known,
    row_without_loss,
)
from frozencore.unwrapped_model import base_of

LOGS = "logs"


@dataclass(frozen=True)
class TrainingReport:
    """The report of a training.

    Attributes:
        training: The steps, including those before a resumed checkpoint.
        time_s: Wall time of this call, without scoring validation rows.
        step_s: Median seconds from one step's end to the next; None for a single step.
        resumed_from: The resumed checkpoint.
        selected: The chosen step and its scores; None if no choice was requested.
        state_held_bytes: The training state (:func:`frozencore.tune.training.callbacks.training_state_held`).
        num_trainable: The number of values that train at the same time.
    """

    training: TrainedSteps
    time_s: float
    step_s: float | None
    resumed_from: Path | None
    selected: SelectedCheckpoint | None
    state_held_bytes: int
    num_trainable: int


def train(
    model: nn.Module,
    rows: Sequence[TokenRow],
    recipe: Recipe,
    *,
    pad_id: int,
    checkpoint_dir: Path | None = None,
    checkpoint_steps: int | None = None,
    resume: bool = False,
    selection: Selection | None = None,
    report_to: Sequence[str] = (),
    progress: Progress = no_progress,
) -> TrainingReport:
    """Train the trainable parameters of a model in place, on its device.

    The model is left in evaluation mode; the global random state is restored. With ``checkpoint_dir``, SIGTERM,
    SIGHUP and Ctrl-C take effect at the end of the current step, after its checkpoint; a second Ctrl-C takes effect at
    once.

    Args:
        checkpoint_dir: The folder of checkpoints; ``None`` writes none.
        checkpoint_steps: Optimizer steps between checkpoints; ``None`` writes one after each epoch.
        resume: Continue from the newest whole checkpoint, on a CPU with the same bits as without interruption; from
            the start if there is none.
        selection: Chooses the step to keep by validation rows; ``None`` keeps the last step.
        report_to: Reporters of transformers, which get each loss; TensorBoard writes into ``logs`` beside
            ``checkpoint_dir``.

    Raises:
        ConfigError: Nothing is trainable, or a trainable parameter is below float32.
        DivergenceError: The loss is not finite.
        TrainingError: A checkpoint cannot be written.
    """
    require_trainable(model)
    share, collate = _batches(rows, recipe, pad_id)
    num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    resumed_from = broadcast_from_rank0(lambda: starting_point(checkpoint_dir, resume))
    steps_an_epoch = recipe.num_steps(len(rows)) // recipe.epochs
    score_steps = None
    if selection is not None:
        score_steps = steps_an_epoch if selection.every == "epoch" else selection.every
    start = time.perf_counter()
    monitor = LossMonitor(progress, tokens_a_step=sum(row.num_tokens for row in rows) / steps_an_epoch)
    with ExitStack() as restored:
        stop = restored.enter_context(defer_stop(monitor.say_it_stops)) if checkpoint_dir else Stop()
        restored.enter_context(own_random_state())
        restored.enter_context(without_randomness(model))
        restored.enter_context(with_attributes(base_of(model).config, use_cache=False))
        aside = restored.enter_context(TemporaryDirectory())
        folder = checkpoint_dir or Path(broadcast_from_rank0(lambda: aside))  # one folder for all processes
        callbacks: list[TrainerCallback] = [
            monitor,
            Saving(stop, selection, every=checkpoint_steps if selection else None),
            *([EarlyStoppingCallback(selection.patience)] if selection and selection.patience else []),
        ]
        save_steps = None if checkpoint_dir is None else checkpoint_steps or steps_an_epoch
        with adapters_known(model):
            trainer = CompletionTrainer(
                recipe,
                selection,
                monitor,
                model=model,
                args=training_arguments(
                    model, recipe, share, folder, save_steps=save_steps, score_steps=score_steps, report_to=report_to
                ),
                data_collator=collate,
                train_dataset=[*rows, row_without_loss(pad_id)],
                eval_dataset=[],  # the trainer scores by its selection
                callbacks=callbacks,
            )
        trainer.remove_callback(PrinterCallback)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                callback.logging_dir = callback.logging_dir or str(folder.parent / LOGS)
        with explain_disk_errors(checkpoint_dir):
            try:
                trainer.train(resume_from_checkpoint=None if resumed_from is None else str(resumed_from))
            except EndedEarly:
                trainer._load_best_model()
        wait_for_all()  # the first process removes a folder of its own, from which the others load the chosen step
    state, scores = trainer.state, scores_in(trainer.state.log_history)
    is_early = state.global_step < state.max_steps
    if is_early and not (selection and is_patience_lost(scores, selection.patience)):
        raise TrainingError(  # the signal's own handler has returned
            f"Training was told to stop at step {state.global_step} of {state.max_steps}. "
            "Its checkpoint is whole: resume it."
        )
    model.eval()
    chosen = None
    if selection is not None:
        chosen = selected(selection.every, selection.num_rows, scores, monitor.paused_s, is_early=is_early)
    return TrainingReport(
        training=TrainedSteps.of([entry["loss"] for entry in state.log_history if "loss" in entry]),
        time_s=time.perf_counter() - start - monitor.paused_s,
        step_s=median(b - a for a, b in pairwise(monitor.step_ends)) if len(monitor.step_ends) > 1 else None,
        resumed_from=resumed_from,
        selected=chosen,
        state_held_bytes=training_state_held(trainer.optimizer),
        num_trainable=num_trainable,
    )


def _batches(rows: Sequence[TokenRow], recipe: Recipe, pad_id: int) -> tuple[Recipe, RowCollator]:
    """This process's share of the recipe, and the function that makes rows a batch or the groups of a step."""
    share = recipe.of_each(num_ranks())
    # all processes need the same number of passes
    if recipe.overhead_tokens is not None and num_ranks() == 1:
        most_tokens = recipe.batch_size * max(len(row.input_ids) for row in rows)
        share = replace(share, batch_size=share.batch_size * share.accumulation, accumulation=1)
        return share, GroupingCollator(pad_id, most_tokens, recipe.overhead_tokens)
    return share, PaddingCollator(pad_id)


def require_trainable(model: nn.Module) -> None:
    """Refuse a model without trainable parameters, or with some below float32, whose small steps would be lost."""
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    narrow = [f"{name!r} is {dtype}" for name, dtype in dtypes.items() if dtype != torch.float32]
    if narrow or not dtypes:
        raise ConfigError(
            f"Training needs trainable parameters in float32, but {narrow[0] if narrow else 'this model has none'}. "
            "Add an adapter with autocast_adapter_dtype=True, or load the model in float32."
        )
