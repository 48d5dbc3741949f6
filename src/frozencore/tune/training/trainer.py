"""transformers' ``Trainer``, fitted to completions: no logits on prompts, no silent NaN, nothing left changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from frozencore.adapter.bases.in_rounds import InRounds
from frozencore.adapter.saved.card import begin_model_card
from frozencore.calibration.counted import IGNORED
from frozencore.errors import DivergenceError
from frozencore.ranks import largest_over_ranks, num_ranks, wait_for_all
from frozencore.tune.scoring.forward import base_of, forward_accepts, num_virtual_tokens
from frozencore.tune.training.checkpoints import seal_checkpoint
from frozencore.tune.training.row_order import SharedOrder
from frozencore.tune.training.termination import Stop
from frozencore.words import Progress

SPEED_STEPS = 20  # whose speed is said


class CompletionTrainer(Trainer):
    """Asks the model for logits only where there is a loss: with a large vocabulary the prompt's cost more than it."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self._can_skip_logits:
            targets = inputs["labels"][:, 1:]
            kept = (targets != IGNORED).any(0).nonzero().squeeze(-1)
            inputs = inputs | {
                "logits_to_keep": kept + num_virtual_tokens(self.model),
                "shift_labels": targets[:, kept],
            }
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """One process keeps transformers' own, which accelerate replaces by what :class:`SharedOrder` holds."""
        if num_ranks() == 1:
            return super()._get_train_sampler(train_dataset)
        return SharedOrder(self.train_dataset, self.args.data_seed)

    @cached_property
    def _can_skip_logits(self) -> bool:
        return bool(self.model_accepts_loss_kwargs) and forward_accepts(self.model, "logits_to_keep")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A checkpoint, whose model card nobody reads."""
        if output_dir is not None and isinstance(self.model, PeftModel):
            begin_model_card(Path(output_dir))
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """PEFT refuses to load virtual tokens that are to train; these are there, and get the values alone."""
        if num_virtual_tokens(self.model):
            set_peft_model_state_dict(self.model, load_peft_weights(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        """Not counted: counting walks over all parameters at every batch, a tenth of a small model's step."""
        return 0


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


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Every dropout of the model is off: the modules, and the rates that attention layers hold themselves."""
    rates: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            rate = getattr(module, name, None)
            if isinstance(rate, float) and (name != "p" or isinstance(module, nn.modules.dropout._DropoutNd)):
                rates.append((module, name, rate))
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)


@contextmanager
def own_use_cache(model: nn.Module) -> Iterator[None]:
    """The Trainer turns ``config.use_cache`` off; it is afterwards what it was."""
    config = base_of(model).config
    use_cache = getattr(config, "use_cache", True)
    try:
        yield
    finally:
        config.use_cache = use_cache
