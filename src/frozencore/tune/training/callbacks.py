"""Callbacks of a training: they watch its losses, its checkpoints, its state and whether it was told to stop."""

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


DEPTH = 4  # of containers and objects in an optimiser's states


class StateHeld(TrainerCallback, ExportableState):
    """Measures the state that a training holds from one step to the next, at its peak, in bytes of live tensors.

    Counted: gradients, the optimiser's states (the projections of GaLore and APOLLO among them), and what training in
    rounds holds: sums or sketches of moments, the factors of earlier rounds, copies of weights. Not counted: the base
    model, the values that train, their basis, activations, step counters, and copies of what trains that a run keeps to
    go back to (the last good values and the best ones).

    It looks right after an optimiser step, when gradients are still there: after the first step, the last step of each
    round, and the last of all. Within a round nothing is freed, so its last step holds the most of it; between two of
    these steps nothing else changes size. What choosing new bases takes for a moment is not held from step to step; the
    record's memory of each phase has it.

    Attributes:
        peak_bytes: The largest so far, that of the checkpoint included that the training goes on from.
    """

    def __init__(self, model: nn.Module, rounds: InRounds | None = None) -> None:
        self.model, self.rounds = model, rounds
        self.peak_bytes = 0
        self._looks_at: set[int] = set()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"peak_bytes": self.peak_bytes}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kept: Any = (state.stateful_callbacks or {}).get(type(self).__name__)
        if isinstance(kept, dict):
            self.peak_bytes = max(self.peak_bytes, int(kept["attributes"]["peak_bytes"]))
        ends = self.rounds.round_ends(state.max_steps) if self.rounds is not None else ()
        self._looks_at = {state.global_step + 1, *ends, state.max_steps}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step + 1 in self._looks_at:
            held = self.rounds.state_tensors() if self.rounds is not None else ()
            now = total_bytes([*gradients_of(self.model), *states_of(kwargs["optimizer"]), *held])
            self.peak_bytes = max(self.peak_bytes, now)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; those that begin at the same place are one, and single numbers are counters."""
    return sum({(str(one.device), one.data_ptr()): one.nbytes for one in tensors if one.ndim and one.numel()}.values())


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """Of every parameter that has one."""
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimiser's states, also those inside objects of its own."""
    return _tensors_in(list(optimizer.state.values()), DEPTH)


def _tensors_in(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        inside: Iterable[object] = ()
        if isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, list | tuple):
            inside = value
        elif hasattr(value, "__dict__"):
            inside = vars(value).values()
        for part in inside:
            yield from _tensors_in(part, depth - 1)
