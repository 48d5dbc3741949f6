"""Cores that train together, with AdamW over all of them at once.

    m ← β₁ m + (1 - β₁) g,    v ← β₂ v + (1 - β₂) g²,    R ← R - η m̂ / (√v̂ + ε)

η, the step count and the clipping factor are one number a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from frozencore.adapter.bank import CoreStack
from frozencore.progress import Progress, no_progress
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.scoring.forward import nats_of_rows
from frozencore.tune.training.callbacks import total_bytes
from frozencore.tune.training.recipe import MAX_GRAD_NORM


def held_out_losses(
    model: nn.Module,
    sets: Sequence[Sequence[TokenRow]],
    *,
    pad_id: int,
    with_cores: Callable[[list[int]], AbstractContextManager[None]] = lambda _: nullcontext(),
    progress: Progress = no_progress,
) -> list[float]:
    """Nats per completion token of each set of rows, with sets mixed in batches; NaN for a set without such tokens.

    Args:
        with_cores: Called with the set index of each row of a batch. The batch runs inside the context that it returns.
    """
    rows = [row for rows in sets for row in rows]
    set_of = [i for i, rows in enumerate(sets) for _ in rows]
    nats = nats_of_rows(
        model, rows, pad_id=pad_id, with_cores=lambda group: with_cores([set_of[i] for i in group]), progress=progress
    )
    totals = [0.0] * len(sets)
    for i, of_row in zip(set_of, nats, strict=True):
        totals[i] += of_row
    counts = [sum(row.num_targets for row in rows) for rows in sets]
    return [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]


BETAS, EPSILON = (0.9, 0.999), 1e-8  # as the Trainer's
CLIP_EPSILON = 1e-6  # as torch's clip_grad_norm_


class TrainedSlots(CoreStack):
    """A :class:`CoreStack` with gradients and moments, float32 on one device; the used slots come first."""

    def __init__(self, model: nn.Module, num_slots: int) -> None:
        super().__init__(model, num_slots)
        cores = [R.detach() for R in self.adapter.cores.values()]
        self.start = torch.cat([R.flatten() for R in cores])
        ((self.device, self.values),) = self.blocks.items()
        assert self.values.dtype == torch.float32
        self.gradients, self.first, self.second = (torch.zeros_like(self.values) for _ in range(3))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def _held(self) -> dict[str, Tensor]:
        """What a slot holds between two steps."""
        return {"values": self.values, "first": self.first, "second": self.second}

    @property
    def state_held_bytes(self) -> int:
        """The training state of one slot: its gradient and moments."""
        return total_bytes((self.gradients, self.first, self.second)) // len(self)

    def clear(self, slot: int) -> None:
        """Reset a slot for a new tenant: the adapter's own core, zero moments."""
        for state in (self.gradients, self.first, self.second):
            state[slot].zero_()
        self.values[slot] = self.start

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """Copies of what a tenant's slot holds between two steps."""
        return {name: state[slot].clone() for name, state in self._held.items()}

    def put(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill a slot with what another one held."""
        self.gradients[slot].zero_()
        for name, state in self._held.items():
            state[slot] = tensors[name]

    def move(self, source: int, target: int) -> None:
        """Move a tenant to another slot, between two steps."""
        for state in self._held.values():
            state[target] = state[source]

    def row_gradients(self, slots: Sequence[int], losses: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the loss of each row (rows) and its own gradient (rows x Σr²); each row uses a copy of its core.

        Args:
            slots: The slot of each row.
            losses: Runs the model on the batch.
        """
        places = torch.tensor(slots, device=self.device)
        copies = {name: core[places].requires_grad_() for name, core in self.cores.items()}
        with self.with_cores(copies):
            row_losses = losses()
            gradients = torch.autograd.grad(row_losses.sum(), list(copies.values()), materialize_grads=True)
        return row_losses.detach(), torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)

    def gradient_norms(self, num_used: int) -> Tensor:
        """The norm of each slot's gradient over all layers."""
        return torch.linalg.vector_norm(self.gradients[:num_used], dim=1)

    def step(self, norms: Tensor, *, rates: Sequence[float], counts: Sequence[int]) -> None:
        """Make one step on the first slots, and zero their gradients. Each argument has one number a slot.

        Args:
            norms: Norms of the gradients.
            rates: η.
            counts: Number of steps, including this one.
        """
        used = len(norms)
        values, g, m, v = (state[:used] for state in (self.values, self.gradients, self.first, self.second))
        (beta1, beta2), column = BETAS, self._column
        g.mul_((MAX_GRAD_NORM / (norms.unsqueeze(1) + CLIP_EPSILON)).clamp_(max=1.0))
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.sqrt(v, out=g)  # reuses the gradient's memory
        g.div_(column([(1 - beta2**count) ** 0.5 for count in counts])).add_(EPSILON)
        torch.div(m, g, out=g)
        g.mul_(column([rate / (1 - beta1**count) for rate, count in zip(rates, counts, strict=True)]))
        values.sub_(g)
        g.zero_()

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=self.device).unsqueeze(1)
