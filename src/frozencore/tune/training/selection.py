"""The choice of the step to keep by its scores on validation rows; the first of the best steps is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from frozencore.errors import ConfigError

Every = Literal["epoch"] | int


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
    score: Callable[[nn.Module], tuple[float, float | None]]
    identity: str
    patience: int | None = None

    def __post_init__(self) -> None:
        require_choosable(self.every, self.patience)


@dataclass(frozen=True)
class Selected:
    """All scores in order, the kept step, the seconds of scoring in this call, and whether training ended early."""

    scores: tuple[StepScore, ...]
    step: int
    time_s: float
    stopped: bool = False


def scores_in(history: Sequence[Mapping[str, Any]]) -> list[StepScore]:
    """The scores in the history that the Trainer logs and saves with each checkpoint."""
    return [
        StepScore(entry["step"], entry["eval_loss"], entry.get("eval_accuracy"))
        for entry in history
        if "eval_loss" in entry
    ]


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
