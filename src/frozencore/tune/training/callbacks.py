"""Callbacks of a training: they watch its losses, checkpoints, training state and requests to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from frozencore.errors import DivergenceError
from frozencore.ranks import largest_over_ranks, wait_for_all
from frozencore.tune.training.checkpoints import Stop, seal_checkpoint
from frozencore.words import Progress

SPEED_STEPS = 20  # averaged for the printed speed


class LossMonitor(TrainerCallback):
    """Report each step's loss, and stop at the first loss that is not finite, before it is saved.

    Args:
        kept: Parameters whose last values with finite loss and gradient are kept for :meth:`put_back`.
        paused_s: Seconds so far outside of steps.
        tokens_a_step: The mean number of tokens of a step, without padding.
    """

    def __init__(
        self,
        progress: Progress | None,
        kept: Sequence[Tensor] = (),
        paused_s: Callable[[], float] = lambda: 0.0,
        tokens_a_step: float = 0.0,
    ) -> None:
        self.progress = progress
        self.tokens_a_step = tokens_a_step
        self.paused_s = paused_s
        self.step_ends: list[float] = []
        self._parameters = kept
        self._told: tuple[int, int] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Copy the parameters, which are now on their device and restored from a checkpoint."""
        self._kept = [parameter.detach() for parameter in self._parameters]
        self._good = [value.clone() for value in self._kept]
        self._tried = [value.clone() for value in self._kept]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Copy the parameters that gave the step's loss, before the step changes them."""
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
            rate = f"rate {logs['learning_rate']:.1e}"
            self.progress("train", *self._told, f"loss {loss:.3f}, {rate}{self._speed()}")

    def put_back(self) -> None:
        """Restore the parameters' last good values after a step that diverged."""
        if self._kept:
            torch._foreach_copy_(self._kept, self._good)

    def _speed(self) -> str:
        """The speed of the last steps, without the first, whose start is unknown."""
        ends = self.step_ends[-SPEED_STEPS:]
        if len(ends) < 2 or ends[-1] <= ends[0]:
            return ""
        return f", {self.tokens_a_step * (len(ends) - 1) / (ends[-1] - ends[0]):,.0f} tokens/s"

    def say_it_stops(self) -> None:
        """Confirm a request to stop while a step is running."""
        if self.progress is not None and self._told is not None:
            with suppress(RuntimeError):  # the interrupted code may be writing to the same screen
                self.progress("train", *self._told, "stops after this step; Ctrl-C again ends it at once")


def divergence(step: int, num_steps: int, loss: float, gradient_norm: float, learning_rate: float) -> str:
    """The message for a step whose loss or gradient is not finite; steps count from 1."""
    way_out = f"Lower the learning rate ({learning_rate}) or lengthen the warm-up."
    if step == 1:
        way_out = "Nothing was updated yet: check the model's weights and dtype for NaN."
    return f"Training diverged at step {step} of {num_steps}: loss {loss}, gradient norm {gradient_norm}. {way_out}"


class Seal(TrainerCallback):
    """Seal every checkpoint after it is written, and tell the stop handler the newest one."""

    def __init__(self, identity: Mapping[str, Any], stop: Stop) -> None:
        self.identity = identity
        self.stop = stop

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        wait_for_all()  # each process writes its own files
        if state.is_world_process_zero:
            seal_checkpoint(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}", self.identity)
            self.stop.saved = f"step {state.global_step} of {state.max_steps} is saved"


class StopWhenAsked(TrainerCallback):
    """End the training after a step, with a checkpoint."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked
        self.stops = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if largest_over_ranks(int(self.asked())):
            self.stops = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stops:
            control.should_save = False  # avoids writing the same checkpoint again


class StateHeld(TrainerCallback, ExportableState):
    """Measure the peak of the state that a training holds between steps, in bytes of live tensors.

    Counted: gradients and the optimizer's states. Not counted: the base model, the trained values and their basis,
    activations, step counters, and the kept copies of trained values (the last good and the best ones).

    The state is measured right after the first and the last optimizer step, before gradients are freed.

    Attributes:
        peak_bytes: The peak so far, including that of a resumed checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.peak_bytes = 0
        self._looks_at: set[int] = set()

    def state(self) -> dict[str, Any]:
        """The state of this callback in a checkpoint."""
        return {"args": {}, "attributes": {"peak_bytes": self.peak_bytes}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kept: Any = (state.stateful_callbacks or {}).get(type(self).__name__)
        if isinstance(kept, dict):
            self.peak_bytes = max(self.peak_bytes, int(kept["attributes"]["peak_bytes"]))
        self._looks_at = {state.global_step + 1, state.max_steps}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step + 1 in self._looks_at:
            now = total_bytes([*gradients_of(self.model), *states_of(kwargs["optimizer"])])
            self.peak_bytes = max(self.peak_bytes, now)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; tensors with the same address count once, and single numbers (counters) not at all."""
    return sum({(str(one.device), one.data_ptr()): one.nbytes for one in tensors if one.ndim and one.numel()}.values())


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """The gradient of every parameter that has one."""
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's states."""
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
