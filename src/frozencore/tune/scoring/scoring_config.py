"""What a run is scored by, and what its scores decide."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from frozencore.errors import ConfigError
from frozencore.options import FrozenOptions

SelectionMetric = Literal["accuracy", "held_out_loss"]


class FurtherScoresConfig(FrozenOptions):
    """What a run that trains alone may be asked beside its score."""

    samples: Annotated[
        int, Field(ge=0, description="Held-out rows of --data whose completions are generated before and after.")
    ] = 0
    exact_match: Annotated[
        Literal["no", "yes", "auto"],
        Field(
            description="Generate the completions of held-out rows of --data and count those that are right word for "
            "word; auto: where none is longer than 16 tokens."
        ),
    ] = "no"
    forgetting: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Other tasks by name: the loss on the plain text of 32 of each one's evaluation rows is scored "
            "before and after the training, and tells what it made the model forget."
        ),
    ] = None


class StepChoiceConfig(FrozenOptions):
    """Which step of a training is kept."""

    select_checkpoint: Annotated[
        Literal["none", "epoch"] | PositiveInt,
        Field(
            description="Keep the best of the steps that validation rows are scored at: each epoch's last, or every so "
            "many steps; none keeps the last step, as does a run without validation rows."
        ),
    ] = "none"
    select_by: Annotated[
        SelectionMetric, Field(description="What the best step is: accuracy (ties by held-out loss), or held_out_loss.")
    ] = "accuracy"
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            description="Scores of --select-checkpoint in a row that may be no better before the training ends. "
            "Default: it goes on to its last step.",
        ),
    ] = None

    @field_validator("select_checkpoint", mode="before")
    @classmethod
    def _is_a_choice(cls, came: Any) -> Any:
        if came not in ("none", "epoch") and (type(came) is not int or came < 1):
            raise ConfigError(
                f"select_checkpoint is none, epoch, or a number of steps from 1 up, but {came!r:.50} came."
            )
        return came


class ScoringConfig(StepChoiceConfig, FurtherScoresConfig):
    """The rows and the metric that say what a run was worth, and which of its steps is kept."""

    evaluate_on: Annotated[
        Literal["evaluation", "validation"],
        Field(description="Rows to score on; validation: rows to choose options with, never evaluated."),
    ] = "evaluation"
    max_new_tokens: Annotated[
        int | None, Field(ge=1, description="Tokens of a generated answer. Default: the task's number.")
    ] = None
