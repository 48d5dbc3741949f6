"""The options of scoring a run, and of choosing a step by its scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from frozencore.errors import ConfigError
from frozencore.options import FrozenOptions

SelectionMetric = Literal["accuracy", "held_out_loss"]


class FurtherScoresConfig(FrozenOptions):
    """Further scores, for a run that trains alone."""

    samples: Annotated[
        int, Field(ge=0, description="Held-out rows of --data to complete before and after training.")
    ] = 0
    exact_match: Annotated[
        Literal["no", "yes", "auto"],
        Field(
            description="Generate the completions of held-out rows of --data and count those that are exactly right; "
            "auto: only if no completion is longer than 16 tokens."
        ),
    ] = "no"
    forgetting: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Other tasks by name, to measure what the model forgets: the loss on the plain text of 32 "
            "evaluation rows of each task, before and after training."
        ),
    ] = None


class StepChoiceConfig(FrozenOptions):
    """The choice of the step to keep."""

    select_checkpoint: Annotated[
        Literal["none", "epoch"] | PositiveInt,
        Field(
            description="Score validation rows and keep the best step. epoch: score after each epoch; a number: score "
            "after every so many steps; none: keep the last step, as does a run without validation rows."
        ),
    ] = "none"
    select_by: Annotated[
        SelectionMetric,
        Field(description="How the best step is found: by accuracy (ties by held-out loss), or by held_out_loss."),
    ] = "accuracy"
    patience: Annotated[
        int | None,
        Field(
            ge=1,
            description="End the training after so many scores of --select-checkpoint in a row without improvement. "
            "Default: never.",
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
    """The rows and the metric that score a run, and the choice of the step to keep."""

    evaluate_on: Annotated[
        Literal["evaluation", "validation"],
        Field(
            description="Rows that give the score; validation: rows for choosing options, never among the evaluation "
            "rows."
        ),
    ] = "evaluation"
    max_new_tokens: Annotated[
        int | None, Field(ge=1, description="The most tokens of a generated answer. Default: the task's number.")
    ] = None
