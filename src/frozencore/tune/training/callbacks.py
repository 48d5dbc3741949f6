"""Callbacks of a training: they watch its losses, choose its step by validation rows, and mark its checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from frozencore.distributed import all_gather, wait_for_all
from frozencore.errors import DivergenceError, TrainingError
from frozencore.progress import Progress
from frozencore.tune.record import SelectedCheckpoint, StepScored
from frozencore.tune.training.checkpoints import Stop, is_whole, mark_whole

Every = Literal["epoch"] | int


@dataclass(frozen=True)
class Selection:
    """The choice of a step by validation rows.

    Attributes:
        every: Steps between two scores, or ``epoch``; the last step is always scored.
        score: Computes a model's held-out loss and accuracy (None: only the loss chooses), without changing it.
        patience: End the training after so many scores in a row without improvement; None never does.
        num_rows: The number of validation rows, for the record.
    """

    every: Every
    score: Callable[[nn.Module], tuple[float, float | None]]
    patience: int | None = None
    num_rows: int = 0


def scores_in(history: Sequence[Mapping[str, Any]]) -> list[StepScored]:
    """The scores in the history that the Trainer logs and saves with each checkpoint."""
    return [
        StepScored(step=entry["step"], held_out_loss=entry["eval_loss"], accuracy=entry.get("eval_accuracy"))
        for entry in history
        if "eval_loss" in entry
    ]


def is_due(every: Every, step: int, num_steps: int, steps_an_epoch: int) -> bool:
    """Return whether to score after this step."""
    interval = steps_an_epoch if every == "epoch" else every
    return step > 0 and (step % interval == 0 or step == num_steps)


def best_score(scores: Sequence[StepScored]) -> StepScored:
    """The score with the best accuracy, then the lowest loss; the first of equal ones."""
    return max(scores, key=lambda score: (score.accuracy or 0.0, -score.held_out_loss))


def is_patience_lost(scores: Sequence[StepScored], patience: int | None) -> bool:
    """Return whether the last ``patience`` scores brought no improvement."""
    return patience is not None and bool(scores) and len(scores) - 1 - scores.index(best_score(scores)) >= patience


def selected(
    every: Every, num_rows: int, scores: Sequence[StepScored], time_s: float, *, is_early: bool
) -> SelectedCheckpoint:
    """The record of a choice: the best of these scores on validation rows; ``is_early`` if they ended the training."""
    return SelectedCheckpoint(
        every=every,
        by="held_out_loss" if scores[0].accuracy is None else "accuracy",
        rows=num_rows,
        kept_step=best_score(scores).step,
        scores=tuple(scores),
        time_s=time_s,
        **({"stopped_early": True} if is_early else {}),
    )


SPEED_STEPS = 20  # averaged for the printed speed


class LossMonitor(TrainerCallback):
    """Report each step's loss, and stop at the first loss that is not finite, before it is saved.

    Args:
        tokens_a_step: The mean number of tokens of a step, without padding.

    Attributes:
        paused_s: Seconds of scoring validation rows so far, which are no part of a step.
    """

    def __init__(self, progress: Progress, tokens_a_step: float = 0.0) -> None:
        self.progress = progress
        self.tokens_a_step = tokens_a_step
        self.paused_s = 0.0
        self.step_ends: list[float] = []
        self._reported: tuple[int, int] | None = None

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any
    ) -> None:
        if "loss" not in logs:
            return
        self.step_ends.append(time.perf_counter() - self.paused_s)
        loss, gradient_norm = logs["loss"], logs.get("grad_norm", 0.0)
        if not math.isfinite(loss) or not math.isfinite(gradient_norm):
            raise DivergenceError(
                divergence(state.global_step, state.max_steps, loss, gradient_norm, args.learning_rate)
            )
        ends, speed = self.step_ends[-SPEED_STEPS:], ""
        if len(ends) > 1 and ends[-1] > ends[0]:  # the first step's start is unknown
            speed = f", {self.tokens_a_step * (len(ends) - 1) / (ends[-1] - ends[0]):,.0f} tokens/s"
        self._reported = state.global_step, state.max_steps
        self.progress("train", *self._reported, f"loss {loss:.3f}, rate {logs['learning_rate']:.1e}{speed}")

    def say_it_stops(self) -> None:
        """Confirm a request to stop while a step is running."""
        if self._reported is not None:
            with suppress(RuntimeError):  # the interrupted code may be writing to the same screen
                self.progress("train", *self._reported, "stops after this step; Ctrl-C again ends it at once")


def divergence(step: int, num_steps: int, loss: float, gradient_norm: float, learning_rate: float) -> str:
    """The message for a step whose loss or gradient is not finite; steps count from 1."""
    way_out = f"Lower the learning rate ({learning_rate}) or lengthen the warm-up."
    if step == 1:
        way_out = "Nothing was updated yet: check the model's weights and dtype for NaN."
    return f"Training diverged at step {step} of {num_steps}: loss {loss}, gradient norm {gradient_norm}. {way_out}"


class EndedEarly(Exception):  # noqa: N818  # no error
    """A resumed training has ended early before, because its scores stopped improving."""


class Saving(TrainerCallback):
    """Mark every checkpoint as whole after the Trainer has written it; save and end when a signal asks to.

    Args:
        selection: The choice of a step, if the Trainer makes one; it then saves the steps that it scores.
        every: Steps between further checkpoints.
    """

    def __init__(self, stop: Stop, selection: Selection | None, every: int | None) -> None:
        self.stop, self.selection, self.every = stop, selection, every

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let a resumed training save and find its best step by the arguments of this call, also in a moved folder."""
        state.save_steps, state.eval_steps = int(args.save_steps), int(args.eval_steps or 0)
        if state.best_global_step:
            best = Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}"
            if not is_whole(best):
                raise TrainingError(
                    f"The best step so far is {state.best_global_step}, but {best} is incomplete. Remove the "
                    f"checkpoints in {args.output_dir} and train again."
                )
            state.best_model_checkpoint = str(best)
            if self.selection and is_patience_lost(scores_in(state.log_history), self.selection.patience):
                raise EndedEarly

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.every and state.global_step % self.every == 0:
            control.should_save = True
        self._stop_if_asked(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._stop_if_asked(control)

    def _stop_if_asked(self, control: TrainerControl) -> None:
        if any(all_gather(self.stop())):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        wait_for_all()  # each process writes its own files
        if state.is_world_process_zero:
            mark_whole(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
            self.stop.saved = f"step {state.global_step} of {state.max_steps} is saved"


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; tensors with the same address count once, and single numbers (counters) not at all."""
    return sum({(str(one.device), one.data_ptr()): one.nbytes for one in tensors if one.ndim and one.numel()}.values())


def training_state_held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a training keeps between steps: gradients, and the optimizer's states of the parameters it has moved.

    Not counted: the base model, the trained values and their basis, activations, and step counters.
    """
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(parameter.nbytes for parameter in optimizer.state) + total_bytes(states)
