"""What watches a training: its losses, its checkpoints, and whether it was told to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from frozencore.adapter.bases.in_rounds import InRounds
from frozencore.errors import DivergenceError
from frozencore.ranks import largest_over_ranks, wait_for_all
from frozencore.tune.training.checkpoints import Stop, seal_checkpoint
from frozencore.words import Progress

SPEED_STEPS = 20  # whose speed is said


class LossMonitor(TrainerCallback):
    """Reports each step's loss, and stops at the first that is not finite, before it can be saved.

    Args:
        kept: Parameters that :meth:`put_back` gives the last values whose loss and gradient were finite.
        rounds: What ends the rounds of the training.
        paused_s: Seconds so far that were not spent on steps.
        tokens_a_step: In the mean, padding left out.
    """

    def __init__(
        self,
        progress: Progress | None,
        kept: Sequence[Tensor] = (),
        rounds: InRounds | None = None,
        paused_s: Callable[[], float] = lambda: 0.0,
        tokens_a_step: float = 0.0,
    ) -> None:
        self.progress = progress
        self.tokens_a_step = tokens_a_step
        self.rounds = rounds
        self.paused_s = paused_s
        self.step_ends: list[float] = []
        self._parameters = kept
        self._told: tuple[int, int] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The parameters are where they train, as a checkpoint had them."""
        self._kept = [parameter.detach() for parameter in self._parameters]
        self._good = [value.clone() for value in self._kept]
        self._tried = [value.clone() for value in self._kept]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What the step's loss is of, before the step changes it."""
        if self._kept:
            torch._foreach_copy_(self._tried, self._kept)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        if "loss" not in logs:
            return
        self.step_ends.append(time.perf_counter() - self.paused_s())
        loss, gradient_norm = logs["loss"], logs.get("grad_norm", 0.0)
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            raise DivergenceError(
                divergence(state.global_step, state.max_steps, loss, gradient_norm, args.learning_rate)
            )
        self._good, self._tried = self._tried, self._good
        if self.progress is not None:
            self._told = state.global_step, state.max_steps
            spent = f", epsilon {logs['epsilon']:.3f}" if "epsilon" in logs else ""
            rate = f"rate {logs['learning_rate']:.1e}"
            self.progress("train", *self._told, f"loss {loss:.3f}, {rate}{spent}{self._speed()}")

    def put_back(self, step: int) -> None:
        """Give the parameters their last good values, after a step that has diverged."""
        if self.rounds is not None:
            self.rounds.take_back(step)
        if self._kept:
            torch._foreach_copy_(self._kept, self._good)

    def _speed(self) -> str:
        """Of the last steps; the first one has no beginning that was seen."""
        ends = self.step_ends[-SPEED_STEPS:]
        if len(ends) < 2 or ends[-1] <= ends[0]:
            return ""
        return f", {self.tokens_a_step * (len(ends) - 1) / (ends[-1] - ends[0]):,.0f} tokens/s"

    def say_it_stops(self) -> None:
        """To who has just asked for it, while a step is running."""
        if self.progress is not None and self._told is not None:
            with suppress(RuntimeError):  # what is interrupted may be a write to the same screen
                self.progress("train", *self._told, "stops after this step; Ctrl-C again ends it at once")


def divergence(step: int, num_steps: int, loss: float, gradient_norm: float, learning_rate: float) -> str:
    """What is said of a step whose loss or gradient is not finite; steps count from 1."""
    way_out = f"Lower the learning rate ({learning_rate}) or lengthen the warm-up."
    if step == 1:
        way_out = "Nothing was updated yet: check the model's weights and dtype for NaN."
    return f"Training diverged at step {step} of {num_steps}: loss {loss}, gradient norm {gradient_norm}. {way_out}"


class Seal(TrainerCallback):
    """Seals every checkpoint once it is written; who stops the training is told which is the newest."""

    def __init__(self, identity: Mapping[str, Any], stop: Stop) -> None:
        self.identity = identity
        self.stop = stop

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        wait_for_all()  # each process has files of its own there
        if state.is_world_process_zero:
            seal_checkpoint(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}", self.identity)
            self.stop.saved = f"step {state.global_step} of {state.max_steps} is saved"


class StopWhenAsked(TrainerCallback):
    """Ends the training after a step, with a checkpoint of it."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked
        self.stops = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if largest_over_ranks(int(self.asked())):
            self.stops = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stops:
            control.should_save = False  # the same checkpoint would be written again
