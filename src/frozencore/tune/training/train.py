"""Train by the recipe on transformers' ``Trainer`` (paper, appendix "Complete Experimental Protocol").

AdamW without weight decay over the trainable parameters, cosine schedule with warm-up, gradients clipped at 1, no
dropout. The loss is the mean over the completion tokens of one optimizer step. Splitting a step into batches changes
speed and memory, not the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PrinterCallback

from frozencore.adapter.trainable import require_float32, require_own_parameters
from frozencore.calibration.batches import on_one_side, rope_limit
from frozencore.calibration.preserve import own_random_state, plain_passes
from frozencore.errors import ConfigError, DataError, DivergenceError, TrainingError
from frozencore.ranks import num_ranks
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.batching import (
    collator_of,
    filled_up,
    without_fillers,
)
from frozencore.tune.training.callbacks import LossMonitor, Seal, StateHeld, StopWhenAsked
from frozencore.tune.training.checkpoints import Stop, defer_stop, explain_disk_errors, starting_point
from frozencore.tune.training.recipe import (
    STEPS_VERSION,
    Recipe,
    training_arguments,
)
from frozencore.tune.training.reporting import Reports
from frozencore.tune.training.selection import NoBetterError, Selected, Selection, Selector
from frozencore.tune.training.trainer import (
    CompletionTrainer,
    GroupingTrainer,
    adapters_known,
    own_use_cache,
)
from frozencore.words import Progress


@dataclass(frozen=True)
class TrainingReport:
    """The report of a training.

    Attributes:
        num_steps: Optimizer steps, including those before a resumed checkpoint.
        losses: The loss of each step, in nats per completion token.
        time_s: Wall time of this call, without scoring validation rows and starting reporters.
        step_s: Median seconds from one step's end to the next; None for a single step.
        resumed_from: The resumed checkpoint.
        selected: The chosen step and its scores; None if no choice was requested.
        side_by_side: The number of trainings that ran together, and how many at once; None for a training alone.
        state_held_bytes: The peak of the training state (:mod:`frozencore.tune.training.callbacks`).
        values_at_once: The number of values that train at the same time; None if trained together with others.
    """

    num_steps: int
    losses: tuple[float, ...]
    time_s: float
    step_s: float | None
    resumed_from: Path | None
    selected: Selected | None = None
    side_by_side: tuple[int, int] | None = None
    values_at_once: int | None = None
    state_held_bytes: int = 0

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps; NaN without steps."""
        tail = self.losses[-math.ceil(len(self.losses) / 10) :]
        return sum(tail) / len(tail) if tail else math.nan


def train(
    model: nn.Module,
    rows: Sequence[TokenRow],
    recipe: Recipe,
    *,
    pad_id: int,
    checkpoint_dir: Path | None = None,
    checkpoint_steps: int | None = None,
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    selection: Selection | None = None,
    reports: Reports | None = None,
    progress: Progress | None = None,
) -> TrainingReport:
    """Train the trainable parameters of a model in place, on its device.

    The model is left in evaluation mode; the global random state is restored. With ``checkpoint_dir``, SIGTERM and
    Ctrl-C take effect at the end of the current step, after its checkpoint; a second Ctrl-C takes effect at once.

    Args:
        checkpoint_dir: The folder of checkpoints; ``None`` writes none.
        checkpoint_steps: Optimizer steps between checkpoints; ``None`` writes one after each epoch.
        resume: Continue from the newest complete checkpoint, on a CPU with the same bits as without interruption; from
            the start if there is none.
        identity: Further inputs that a resumed checkpoint must share, beside recipe, rows and the shapes of the trained
            parameters; JSON values by name.
        selection: Chooses the step to keep by validation rows; ``None`` keeps the last step.
        reports: The reporters, which get each loss.

    Raises:
        ConfigError: Nothing is trainable, trainable parameters are below float32, parameters outside the frozen-core
            adapter's configuration are trainable, or the model does not separate rows joined end to end.
        DataError: There are no rows.
        DivergenceError: The loss is not finite. A frozen-core adapter then has its last good values.
        TrainingError: A checkpoint cannot be written, or the folder holds checkpoints of another run, or ``resume``
            is off.
    """
    if not rows:
        raise DataError("Training needs at least one row, got none.")
    require_float32(model)
    kept = require_own_parameters(model)
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ConfigError(
            f"Between checkpoints there must be at least one step, got checkpoint_steps={checkpoint_steps}."
        )
    own = recipe.of_each(num_ranks())
    limit = rope_limit(model)
    mixed = len(on_one_side([range(len(rows))], [len(row.input_ids) for row in rows], limit)) > 1
    # all processes need the same number of passes
    grouped = (recipe.pass_tokens is not None or mixed) and num_ranks() == 1
    if mixed and not grouped:
        own = replace(own, batch_size=1, accumulation=own.batch_size * own.accumulation)
    if grouped:
        own = replace(own, batch_size=own.batch_size * own.accumulation, accumulation=1)
    identity = {**(identity or {}), **_identity(model, recipe, rows)}
    if selection is not None:
        identity |= {"scored every": selection.every, "validation rows": selection.identity}
        identity |= {} if selection.patience is None else {"patience": selection.patience}
    values_at_once = sum(p.numel() for p in model.parameters() if p.requires_grad)
    resumed_from = starting_point(checkpoint_dir, resume, identity)
    held = StateHeld(model)
    start = time.perf_counter()
    selector: Selector | None = None
    monitor = LossMonitor(
        progress,
        kept,
        paused_s=lambda: selector.time_s if selector else 0.0,
        tokens_a_step=sum(row.num_tokens for row in rows) * recipe.epochs / recipe.num_steps(len(rows)),
    )
    with ExitStack() as restored:
        asked = restored.enter_context(defer_stop(monitor.say_it_stops)) if checkpoint_dir else Stop()
        restored.enter_context(own_random_state())
        restored.enter_context(plain_passes(model))
        restored.enter_context(own_use_cache(model))
        told = [reports] if reports else []
        folder = checkpoint_dir or Path(restored.enter_context(TemporaryDirectory()))
        if selection is not None:
            steps_an_epoch = recipe.num_steps(len(rows)) // recipe.epochs
            selector = Selector(
                selection,
                model,
                steps_an_epoch=steps_an_epoch,
                asked=asked,
                resumed_from=resumed_from,
                reporters=told,
            )
        watching = [monitor, *filter(None, [selector]), held]
        make: Any = GroupingTrainer if grouped else CompletionTrainer
        with adapters_known(model):
            trainer = make(
                recipe,
                model=model,
                args=training_arguments(
                    model, recipe, own, len(rows), folder, checkpoint_dir is not None, checkpoint_steps
                ),
                data_collator=without_fillers(collator_of(recipe, rows, pad_id, grouped=grouped, limit=limit)),
                train_dataset=filled_up(rows, own.batch_size * num_ranks()),
                callbacks=[*watching, Seal(identity, asked), StopWhenAsked(asked), *told],
            )
        trainer.remove_callback(PrinterCallback)
        with explain_disk_errors(checkpoint_dir), suppress(NoBetterError):
            try:
                trainer.train(resume_from_checkpoint=None if resumed_from is None else str(resumed_from))
            except DivergenceError:
                monitor.put_back()
                raise
    stopped = selector is not None and selector.stopped
    if trainer.state.global_step < trainer.state.max_steps and not stopped:  # the signal's own handler has returned
        raise TrainingError(
            f"Training was told to stop at step {trainer.state.global_step} of {trainer.state.max_steps}. "
            "Its checkpoint is whole: resume it."
        )
    model.eval()
    selected = selector.put_back() if selector else None
    losses = tuple(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    beside_s = (selected.time_s if selected else 0.0) + (reports.begin_s if reports else 0.0)
    return TrainingReport(
        num_steps=trainer.state.global_step,
        losses=losses,
        time_s=time.perf_counter() - start - beside_s,
        step_s=median(b - a for a, b in pairwise(monitor.step_ends)) if len(monitor.step_ends) > 1 else None,
        resumed_from=resumed_from,
        selected=selected,
        state_held_bytes=held.peak_bytes,
        values_at_once=values_at_once,
    )


def _identity(model: nn.Module, recipe: Recipe, rows: Sequence[TokenRow]) -> dict[str, Any]:
    """The inputs that a checkpoint must share with the run that resumes it: parameters, recipe and rows."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {
        **STEPS_VERSION,
        **recipe.content(),
        "rows": _hash_of([row.trained_on for row in rows]),
        "trainable parameters": _hash_of(shapes),
    }


def _hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
