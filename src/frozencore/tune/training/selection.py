"""Choose the step to keep: score validation rows during training, and restore the best values at the end.

A step is scored after its checkpoint is written, so that a kill during scoring loses no step. Each checkpoint holds the
earlier scores and the best values so far, so a resumed training makes the same choice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from frozencore.calibration.preserve import own_random_state
from frozencore.errors import ConfigError, DivergenceError, ModelError, TrainingError
from frozencore.tune.training.checkpoints import step_of
from frozencore.words import Progress

Every = Literal["epoch"] | int
SCORES, VALUES = "selection.json", "selection.safetensors"


@dataclass(frozen=True)
class StepScore:
    """The validation scores after a step: nats per completion token, and accuracy."""

    step: int
    held_out_loss: float
    accuracy: float | None = None

    @property
    def worth(self) -> tuple[float, float]:
        """A sort key, larger is better: accuracy if there is one, then a lower loss."""
        return self.accuracy or 0.0, -self.held_out_loss


class NoBetterError(Exception):
    """The scores stopped improving, so the training ends normally."""


@dataclass(frozen=True)
class Selection:
    """The choice of a step by validation rows.

    Attributes:
        every: Steps between two scores, or ``epoch``; the last step is always scored.
        score: Computes a model's held-out loss and accuracy (None: only the loss chooses), without changing it.
        identity: The inputs of the scores; a resumed checkpoint must share them.
        patience: End the training after so many scores in a row without improvement; None never does.
    """

    every: Every
    score: Callable[[nn.Module, Progress], tuple[float, float | None]]
    identity: str
    patience: int | None = None

    def __post_init__(self) -> None:
        require_choosable(self.every, self.patience)


def require_choosable(every: Every, patience: int | None) -> None:
    """Check the options of scoring and early stopping.

    Raises:
        ConfigError: ``every`` or ``patience`` is less than 1.
    """
    if patience is not None and patience < 1:
        raise ConfigError(f"patience is a number of scores, at least 1, but {patience} came.")
    if every != "epoch" and every < 1:
        raise ConfigError(f"A training is scored every epoch or every so many steps, at least 1, but {every} came.")


def is_due(every: Every, step: int, num_steps: int, steps_an_epoch: int) -> bool:
    """Return whether to score after this step."""
    interval = steps_an_epoch if every == "epoch" else every
    return step > 0 and (step % interval == 0 or step == num_steps)


def leader(scores: Sequence[StepScore]) -> StepScore:
    """The best score; the first of equal ones."""
    return max(scores, key=lambda score: score.worth)


def is_patience_lost(scores: Sequence[StepScore], patience: int | None) -> bool:
    """Return whether the last ``patience`` scores brought no improvement."""
    return patience is not None and bool(scores) and len(scores) - 1 - scores.index(leader(scores)) >= patience


@dataclass(frozen=True)
class Selected:
    """All scores in order, the kept step, the seconds of scoring in this call, and whether training ended early."""

    scores: tuple[StepScore, ...]
    step: int
    time_s: float
    stopped: bool = False


class Selector(TrainerCallback):
    """Score the steps that are due, and keep the values of the best step.

    Args:
        steps_an_epoch: Optimizer steps of an epoch.
        asked: Whether the training was told to stop.
        resumed_from: The resumed checkpoint.
        reporters: Get each score, as ``eval_loss`` and ``eval_accuracy``.
    """

    def __init__(
        self,
        selection: Selection,
        model: nn.Module,
        *,
        steps_an_epoch: int,
        asked: Callable[[], bool],
        resumed_from: Path | None,
        reporters: Sequence[TrainerCallback] = (),
    ) -> None:
        self.selection = selection
        self.model = model
        self.steps_an_epoch = steps_an_epoch
        self.asked = asked
        self.reporters = reporters
        self.time_s = 0.0
        self.stopped = False
        self._parameters: dict[str, Tensor] = {}
        self._scores: list[StepScore] = []
        self._best: dict[str, Tensor] = {}
        self._saved_step = 0
        if resumed_from is not None:
            self._scores = [StepScore(**score) for score in json.loads((resumed_from / SCORES).read_text())]
            self._best = load_file(resumed_from / VALUES) if self._scores else {}
            self._saved_step = step_of(resumed_from)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Restore the best values of a checkpoint; the parameters are now on their device."""
        self._parameters = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Score the previous step, whose checkpoint is written."""
        self._score_if_due(args, state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == state.max_steps:
            self._score_if_due(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the scores and best values to the checkpoint, before its seal."""
        self._saved_step = state.global_step
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            (folder / SCORES).write_text(json.dumps([asdict(score) for score in self._scores]))
            if self._best:
                save_file({name: value.cpu().contiguous() for name, value in self._best.items()}, folder / VALUES)

    def put_back(self) -> Selected:
        """Set the parameters to the best step's values."""
        for name, value in self._best.items():
            self._parameters[name].copy_(value)
        return Selected(tuple(self._scores), leader(self._scores).step, self.time_s, self.stopped)

    def _score_if_due(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        step, started = state.global_step, time.perf_counter()
        due = is_due(self.selection.every, step, state.max_steps, self.steps_an_epoch)
        if not due or step in {score.step for score in self._scores}:
            return

        def go_on(*_: object) -> None:
            if self.asked() and self._saved_step == step:
                raise TrainingError(
                    f"Training was told to stop while step {step} of {state.max_steps} was scored. "
                    "Its checkpoint is whole: resume it."
                )

        go_on()
        try:
            with own_random_state():
                loss, accuracy = self.selection.score(self.model, go_on)
        except ModelError as error:
            raise DivergenceError(f"Training diverged at step {step} of {state.max_steps}: {error}") from error
        self._scores.append(StepScore(step, loss, accuracy))
        told = {"eval_loss": loss} | ({} if accuracy is None else {"eval_accuracy": accuracy})
        for reporter in self.reporters:
            reporter.on_log(args, state, control, logs=dict(told))
        if leader(self._scores).step == step:
            self._best = {name: value.clone() for name, value in self._parameters.items()}
        self.time_s += time.perf_counter() - started
        if is_patience_lost(self._scores, self.selection.patience) and step < state.max_steps:
            self.stopped = True
            raise NoBetterError
