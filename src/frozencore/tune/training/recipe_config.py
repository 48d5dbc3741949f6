"""How a run trains: the options that a recipe is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from frozencore.calibration.calibration_options import RefreshMemory
from frozencore.options import FrozenOptions
from frozencore.privacy import CLIP, PrivateBudget

BETA = 0.1


class StepsConfig(FrozenOptions):
    """The steps of the optimizer. Runs that train side by side may differ in these."""

    learning_rate: Annotated[
        float | None, Field(gt=0, description="The peak. Default: the method's own, 1e-2 for cores.")
    ] = None
    warmup: Annotated[
        float | None,
        Field(ge=0, le=1, description="Share of the steps in which the rate rises. Default: the method's own."),
    ] = None
    epochs: Annotated[
        int | None,
        Field(ge=1, description="Default: the task's number; of own data 1, up to 8 where the rows are few."),
    ] = None
    batch_size: Annotated[
        Literal["auto"] | PositiveInt,
        Field(
            description="Rows in one forward pass; auto: as many as fit of the rows of an optimiser step, whose number "
            "--accumulation then is, in groups of similar length where that pays."
        ),
    ] = 1
    accumulation: Annotated[int, Field(ge=1, description="Forward passes in one optimiser step.")] = 8
    seed: Annotated[
        int, Field(ge=0, lt=2**32, description="Of calibration rows, row order, drawn labels and random directions.")
    ] = 42

    @property
    def rows_a_step(self) -> int:
        """Training rows of one optimizer step, however they are cut into batches."""
        return self.accumulation * (1 if self.batch_size == "auto" else self.batch_size)


class AloneConfig(FrozenOptions):
    """What only a run that trains alone can do."""

    loss: Annotated[
        Literal["sft", "dpo"],
        Field(
            description="sft: the loss on completions. dpo: TRL's DPO on rows with prompt, chosen and rejected; the "
            "model without its adapter is the reference."
        ),
    ] = "sft"
    dpo_beta: Annotated[
        float | None,
        Field(gt=0, description="How strongly DPO holds the model to the reference. Default: 0.1, TRL's."),
    ] = None
    padding_free: Annotated[
        bool,
        Field(
            description="Lay the rows of a forward pass end to end in one, apart from one another, instead of padding "
            "them. Pays with attention kernels that know the rows' lengths, and for few short rows."
        ),
    ] = False
    refresh: Annotated[
        PositiveInt | Literal["auto"],
        Field(
            description="Train in that many rounds, each on new bases from the moments of the batches so far; the "
            "rounds' cores add up (LoRA: each on new factors). 1: on the first bases to the end. auto: one for each "
            "hundred rows that are trained on and each forty that are summed, of six steps at least, and at most "
            "sixteen.",
        ),
    ] = 1
    refresh_cost: Annotated[
        float | None,
        Field(
            gt=0,
            description="Of the products of the training, how many the moments of refresh may add: it decides how many "
            "steps they are of. Default: 0.09; 0.5 is every step.",
        ),
    ] = None
    refresh_memory: RefreshMemory = None
    report_to: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb"], ...] | None,
        Field(description="Who is told losses and scores as they come: tensorboard (in logs/), trackio, wandb."),
    ] = None

    @property
    def beta(self) -> float | None:
        """The beta of DPO; None for the loss on completions."""
        return None if self.loss == "sft" else self.dpo_beta or BETA


class PrivateConfig(FrozenOptions):
    """The privacy budget of a training."""

    private_epsilon: Annotated[
        float | None,
        Field(
            gt=0,
            description="Train within this privacy budget, which bounds what the cores say of any one row. Usual: 1 "
            "to 8; with --private-delta.",
        ),
    ] = None
    private_delta: Annotated[
        float | None,
        Field(gt=0, lt=1, description="The chance that the bound may fail; below one in the training rows, 1e-5."),
    ] = None
    private_clip: Annotated[
        float | None, Field(gt=0, description=f"The longest gradient that a row may add to a step. Default: {CLIP:g}.")
    ] = None

    @property
    def private_budget(self) -> PrivateBudget | None:
        """What a private training may spend; None for one that is not private."""
        if self.private_epsilon is None or self.private_delta is None:
            return None
        return PrivateBudget(self.private_epsilon, self.private_delta, self.private_clip or CLIP)


class RecipeConfig(StepsConfig, AloneConfig, PrivateConfig):
    """How a run trains."""

    save_steps: Annotated[
        int | None,
        Field(ge=1, description="Optimiser steps between checkpoints. Default: one an epoch, and one at Ctrl-C."),
    ] = None
