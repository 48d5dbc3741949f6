"""One tenant: its rows, its recipe, and what they say of each of its steps, in company as alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.selection import Every, is_due, require_choosable


@dataclass(frozen=True)
class Validation:
    """Rows whose held-out loss chooses which of a tenant's steps is kept.

    Attributes:
        every: Steps between two scores, or ``epoch``; the last step is scored in any case.
        patience: Scores in a row that may be no better than the best before the tenant stops; None for no early stop.
    """

    rows: Sequence[TokenRow]
    every: Every = "epoch"
    patience: int | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError("To choose among the steps of a tenant there must be rows to validate on, got none.")
        require_choosable(self.every, self.patience)


@dataclass(frozen=True)
class Tenant:
    """What one core trains on, and how: a step's rows, its rate, and the number of steps follow."""

    rows: Sequence[TokenRow]
    recipe: Recipe
    validation: Validation | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError("Training needs at least one row, got none.")
        if self.recipe.refresh != 1:
            raise ConfigError("Tenants share one basis, which refreshing leaves. Train this one alone, or unrefreshed.")

    @property
    def num_steps(self) -> int:
        return self.recipe.num_steps(len(self.rows))

    @property
    def steps_an_epoch(self) -> int:
        return self.num_steps // self.recipe.epochs

    def step_rows(self, step: int) -> list[TokenRow]:
        """The rows of a step, counted from 0, in the order in which the Trainer would draw them."""
        epoch, within = divmod(step, self.steps_an_epoch)
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        order = torch.randperm(len(self.rows), generator=generator).tolist()
        size = self.recipe.batch_size * self.recipe.accumulation
        return [self.rows[i] for i in order[within * size : (within + 1) * size]]

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a straight rise, then a cosine to zero."""
        rise = math.ceil(self.recipe.warmup * self.num_steps)
        if step < rise:
            return self.recipe.learning_rate * step / rise
        done = (step - rise) / max(1, self.num_steps - rise)
        return self.recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def is_scored(self, step: int) -> bool:
        """Whether the values after so many steps are scored on the validation rows."""
        chosen = self.validation
        return chosen is not None and is_due(chosen.every, step, self.num_steps, self.steps_an_epoch)
