"""Moments that several constructors ask for the same eigenvectors: computed once, for layers of one input too."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frozencore.maths.moments import DenseMoment, LayerMoments


@dataclass
class Memory:
    """Leading eigenpairs by the sums that they are of; there are few sums of one size."""

    pairs: dict[int, list[tuple[Tensor, int, Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))

    def find(self, total: Tensor, num_tokens: int, rank: int) -> tuple[Tensor, Tensor] | None:
        """Those of an equal sum, if so many are known."""
        for held, count, vectors, values in self.pairs[len(total)]:
            if count == num_tokens and len(values) >= rank and (held is total or torch.equal(held, total)):
                return vectors[:, :rank], values[:rank]
        return None


@dataclass(frozen=True)
class RememberedMoments(LayerMoments):
    """Moments of one layer, with a memory that all layers share."""

    memory: Memory = field(default_factory=Memory)

    def leading(self, name: DenseMoment, rank: int) -> tuple[Tensor, Tensor]:
        total = self.total(name)
        found = self.memory.find(total, self.num_tokens, rank)
        if found is None:
            found = super().leading(name, rank)
            self.memory.pairs[len(total)].append((total, self.num_tokens, *found))
        return found
