"""One tenant: its rows, its recipe, and its steps, which are the same as if it trained alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from frozencore.errors import DataError
from frozencore.tune.rows import TokenRow
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.selection import (
    Every,
    Selected,
    StepScore,
    is_due,
    is_patience_lost,
    leader,
    require_choosable,
)
from frozencore.tune.training.train import TrainingReport


@dataclass(frozen=True)
class Validation:
    """Rows whose loss chooses the step that a tenant keeps.

    Attributes:
        every: Steps between two scores, or ``epoch``; the last step is always scored.
        patience: Stop after so many scores in a row without improvement; None never stops early.
    """

    rows: Sequence[TokenRow]
    every: Every = "epoch"
    patience: int | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError("Choosing among the steps of a tenant needs at least one validation row, got none.")
        require_choosable(self.every, self.patience)


@dataclass(frozen=True)
class Tenant:
    """The rows and the recipe of one core, which determine its steps."""

    rows: Sequence[TokenRow]
    recipe: Recipe
    validation: Validation | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError("Training needs at least one row, got none.")

    @property
    def num_steps(self) -> int:
        return self.recipe.num_steps(len(self.rows))

    @property
    def steps_an_epoch(self) -> int:
        return self.num_steps // self.recipe.epochs

    def step_rows(self, step: int) -> list[TokenRow]:
        """The rows of a step, counted from 0, in the Trainer's order."""
        epoch, within = divmod(step, self.steps_an_epoch)
        order = self.recipe.row_order(len(self.rows), epoch)
        size = self.recipe.batch_size * self.recipe.accumulation
        return [self.rows[i] for i in order[within * size : (within + 1) * size]]

    def is_scored(self, step: int) -> bool:
        """Return whether validation rows are scored after this step."""
        chosen = self.validation
        return chosen is not None and is_due(chosen.every, step, self.num_steps, self.steps_an_epoch)


@dataclass(frozen=True)
class Trained:
    """The result of a tenant.

    Attributes:
        cores: R (r x r, float32, on the CPU) by layer: the last, the selected, or after divergence the last good one.
        report: Steps and losses; seconds are the tenant's share of each step, by tokens.
        diverged: The reason in one line if it diverged; None otherwise.
    """

    cores: dict[str, Tensor]
    report: TrainingReport
    diverged: str | None = None


@dataclass
class TenantState:
    """The training state of one tenant between two steps, beside its slot.

    Attributes:
        best: The best cores so far, Σr² values, if validation rows choose.
        steps_s: The tenant's share of each step's seconds.
    """

    name: str
    tenant: Tenant
    losses: list[float] = field(default_factory=list)
    scores: list[StepScore] = field(default_factory=list)
    best: Tensor | None = None
    steps_s: list[float] = field(default_factory=list)
    scoring_s: float = 0.0
    diverged: str | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def has_ended(self) -> bool:
        chosen = self.tenant.validation
        is_stale = chosen is not None and is_patience_lost(self.scores, chosen.patience)
        return self.diverged is not None or self.step == self.tenant.num_steps or is_stale

    def scored(self, loss: float, values: Tensor) -> None:
        """Record the score of the current values, and keep them if they are the best so far."""
        self.scores.append(StepScore(self.step, loss, None))
        if leader(self.scores) is self.scores[-1]:
            self.best = values.clone()

    def report(self, resumed_from: Path | None) -> TrainingReport:
        chosen = None
        if self.scores and self.diverged is None:
            stopped = self.step < self.tenant.num_steps
            chosen = Selected(tuple(self.scores), leader(self.scores).step, self.scoring_s, stopped)
        return TrainingReport(
            num_steps=self.step,
            losses=tuple(self.losses),
            time_s=sum(self.steps_s),
            step_s=median(self.steps_s) if self.steps_s else None,
            resumed_from=resumed_from,
            selected=chosen,
        )

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values, without tenant and tensors."""
        return {
            "name": self.name,
            "losses": self.losses,
            "scores": [asdict(score) for score in self.scores],
            "steps_s": self.steps_s,
            "scoring_s": self.scoring_s,
            "diverged": self.diverged,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], tenant: Tenant, best: Tensor | None) -> TenantState:
        scores = [StepScore(**score) for score in content.pop("scores")]
        return cls(tenant=tenant, scores=scores, best=best, **content)
