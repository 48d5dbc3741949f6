"""The options of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from frozencore.options import FrozenOptions


class AloneConfig(FrozenOptions):
    """Options that only a run that trains alone can have."""

    report_to: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb"], ...] | None,
        Field(description="Report losses and scores to tensorboard (in logs/), trackio or wandb."),
    ] = None


class RecipeConfig(AloneConfig):
    """All options of training."""

    learning_rate: Annotated[
        float | None, Field(gt=0, description="Peak learning rate. Default: the method's own, 1e-2 for cores.")
    ] = None
    warmup: Annotated[
        float | None,
        Field(
            ge=0, le=1, description="Share of the steps in which the learning rate rises. Default: the method's own."
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Field(
            ge=1,
            description="Passes over the training rows. Default: the task's number; for your own data 1, and up to 8 "
            "if there are few rows.",
        ),
    ] = None
    batch_size: Annotated[
        Literal["auto"] | PositiveInt,
        Field(
            description="Rows in one forward pass. auto: as many rows as fit; --accumulation is then the number of "
            "rows in one optimizer step, grouped by length if that is faster."
        ),
    ] = 1
    accumulation: Annotated[int, Field(ge=1, description="Forward passes in one optimizer step.")] = 8
    seed: Annotated[
        int,
        Field(ge=0, lt=2**32, description="Seed of calibration rows, row order and random directions."),
    ] = 42
    save_steps: Annotated[
        int | None,
        Field(
            ge=1,
            description="Optimizer steps between checkpoints. Default: a checkpoint after each epoch, and at Ctrl-C.",
        ),
    ] = None

    @property
    def rows_a_step(self) -> int:
        """Training rows of one optimizer step, for any batch size."""
        return self.accumulation * (1 if self.batch_size == "auto" else self.batch_size)
