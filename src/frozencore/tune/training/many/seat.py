"""A tenant that has a slot: what happened to it so far, and what it is once it has ended."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from frozencore.tune.training.many.tenant import Tenant
from frozencore.tune.training.selection import Selected, StepScore, is_patience_lost, leader
from frozencore.tune.training.train import TrainingReport


@dataclass(frozen=True)
class Trained:
    """What became of a tenant.

    Attributes:
        cores: R (r x r, float32, on the CPU) by layer: the last, the selected, or after divergence the last good one.
        report: Its steps and losses; its seconds are its share of each step, by tokens.
        diverged: Why it ended early, in one line; None for a tenant that came to its end.
    """

    cores: dict[str, Tensor]
    report: TrainingReport
    diverged: str | None = None


@dataclass
class Seat:
    """State of one tenant between two steps, beside its slot.

    Attributes:
        best: The selected cores so far, Σr² values, where validation rows choose.
        steps_s: Its share of each step's seconds.
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
        """Note what the values scored as they are; the best are kept, the first of equal ones."""
        self.scores.append(StepScore(self.step, loss, None))
        if leader(self.scores) is self.scores[-1]:
            self.best = values.clone()

    def report(self, resumed_from: Path | None) -> TrainingReport:
        tail = self.losses[-math.ceil(len(self.losses) / 10) :]
        chosen = None
        if self.scores and self.diverged is None:
            stopped = self.step < self.tenant.num_steps
            chosen = Selected(tuple(self.scores), leader(self.scores).step, self.scoring_s, stopped)
        return TrainingReport(
            num_steps=self.step,
            losses=tuple(self.losses),
            final_loss=sum(tail) / len(tail) if tail else math.nan,
            time_s=sum(self.steps_s),
            step_s=median(self.steps_s) if self.steps_s else None,
            resumed_from=resumed_from,
            selected=chosen,
        )

    def written(self) -> dict[str, Any]:
        """JSON values of all but tenant and tensors."""
        return {
            "name": self.name,
            "losses": self.losses,
            "scores": [asdict(score) for score in self.scores],
            "steps_s": self.steps_s,
            "scoring_s": self.scoring_s,
            "diverged": self.diverged,
        }

    @classmethod
    def read(cls, written: dict[str, Any], tenant: Tenant, best: Tensor | None) -> Seat:
        scores = [StepScore(**score) for score in written.pop("scores")]
        return cls(tenant=tenant, scores=scores, best=best, **written)
