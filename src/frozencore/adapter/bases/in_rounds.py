"""Training in rounds: at the end of each round the trained values are added to a sum, and new ones start from zero.

This is the part that all trainings in rounds share: the ends of the rounds, the learning rate schedule over all rounds,
the short warm-up of each, and the state in checkpoints. :class:`frozencore.Refresh` is for cores; LoRA in rounds is in
``frozencore.tune``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from frozencore.errors import CalibrationError, ConfigError
from frozencore.ranks import own_rank

WARMUP = 0.1  # the share of a round's steps


def round_ends(num_steps: int, rounds: int) -> list[int]:
    """List the steps after which a round ends, except the last."""
    return [round(j * num_steps / rounds) for j in range(1, rounds)]


class InRounds(TrainerCallback, ABC):
    """A callback of transformers' ``Trainer`` that cuts its steps into equal rounds.

    Attributes:
        rounds: The number of rounds, at most one for each step.
    """

    rounds: int
    _begun_at = 0
    _peaks: list[float]

    @property
    @abstractmethod
    def round_now(self) -> int:
        """The number of the current round; the first is 1."""

    @property
    @abstractmethod
    def earlier_values(self) -> int:
        """The number of values of earlier rounds, which are saved but no longer train."""

    @abstractmethod
    def state_tensors(self) -> Iterator[Tensor]:
        """All tensors that the rounds keep between steps."""

    @abstractmethod
    def begin(self, args: TrainingArguments, state: TrainerState) -> None:
        """Prepare the model for a new or resumed training."""

    @abstractmethod
    def next_round(self, optimizer: torch.optim.Optimizer) -> None:
        """End a round: add the trained values to the sum, and start new ones with fresh optimizer state."""

    @abstractmethod
    def take_back_round(self) -> None:
        """Undo :meth:`next_round`."""

    @abstractmethod
    def state_to_save(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint needs beside the adapter."""

    @abstractmethod
    def close(self) -> None:
        """Clean up the model, also after an error; may be called twice."""

    def before_step(self, state: TrainerState) -> None:
        """Prepare the next step, in any round."""

    def choose_rounds(self, args: TrainingArguments, state: TrainerState) -> None:
        """Set the number of rounds if it depends on the training."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()
        self.choose_rounds(args, state)
        if self.rounds > state.max_steps:
            raise ConfigError(
                f"A round has at least one step, but refresh={self.rounds} came for {state.max_steps} steps. "
                "Train longer or in fewer rounds."
            )
        self._begun_at = max((end for end in self.round_ends(state.max_steps) if end < state.global_step), default=0)
        self.begin(args, state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the next round after the last step of a round, whose checkpoint is already written."""
        ends = self.round_ends(state.max_steps)
        if self.round_now < self.rounds and state.global_step == ends[self.round_now - 1]:
            self.next_round(kwargs["optimizer"])
            self._begun_at = state.global_step
        self.before_step(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the first steps of a round smaller, because the fresh optimizer state has no scale yet."""
        groups = kwargs["optimizer"].param_groups
        self._peaks = [group["lr"] for group in groups]
        if self._begun_at:
            length = math.ceil(WARMUP * state.max_steps / self.rounds)
            share = min(1.0, (state.global_step - self._begun_at + 1) / (length + 1))
            for group in groups:
                group["lr"] *= share

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the schedule's learning rates."""
        for group, rate in zip(kwargs["optimizer"].param_groups, self._peaks, strict=True):
            group["lr"] = rate

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add this rank's state to the checkpoint."""
        tensors = {name: total.cpu().contiguous() for name, total in self.state_to_save().items()}
        if tensors:
            save_file(tensors, self._file(args, state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def take_back(self, step: int) -> None:
        """Undo a round's end if this step started with it."""
        if self._begun_at and self._begun_at == step - 1:
            self.take_back_round()

    def round_ends(self, num_steps: int) -> list[int]:
        """The steps after which a round ends, except the last."""
        return round_ends(num_steps, self.rounds)

    def saved_state(self, args: TrainingArguments, state: TrainerState) -> dict[str, Tensor]:
        """Read the state from the checkpoint of a resumed training."""
        file = self._file(args, state)
        if not file.is_file():
            raise CalibrationError(
                f"A checkpoint in the middle of a round holds the state of the rounds, but there is no {file}. Resume "
                "from a checkpoint that was saved with this callback, or start again."
            )
        return load_file(file)

    @staticmethod
    def _file(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / f"refresh-{own_rank()}.safetensors"
