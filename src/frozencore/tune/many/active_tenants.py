"""The tenants that train at the same time, each in a slot, and their common step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from frozencore.calibration.batches import on_one_side, rope_limit
from frozencore.device import fits
from frozencore.tune.many.losses import held_out_losses, row_losses, row_sizes
from frozencore.tune.many.slots import TrainedSlots
from frozencore.tune.many.tenant import Tenant, TenantState
from frozencore.tune.rows import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, row_costs
from frozencore.tune.training.batching import group_by_length, pass_tokens_of
from frozencore.tune.training.callbacks import divergence


class ActiveTenants:
    """The tenants in slots, in order, and the names that wait for a slot.

    Args:
        tokens_per_batch: Tokens of one forward pass; None fills the device.
    """

    def __init__(
        self,
        model: nn.Module,
        tenants: Mapping[str, Tenant],
        slots: TrainedSlots,
        *,
        pad_id: int,
        tokens_per_batch: int | None = None,
    ) -> None:
        self.model, self.tenants, self.slots, self.pad_id = model, tenants, slots, pad_id
        self.tokens_per_batch = tokens_per_batch
        self.states: list[TenantState] = []
        self.waiting = sorted(tenants, key=lambda name: -tenants[name].num_steps)  # longest trainings first
        self.num_steps = 0
        self._shrink, self._pass_tokens = 1, pass_tokens_of(model)

    def fill(self) -> bool:
        """Give free slots to waiting tenants; False if all have ended."""
        while self.waiting and len(self.states) < len(self.slots):
            name = self.waiting.pop(0)
            self.slots.clear(len(self.states))
            self.states.append(TenantState(name, self.tenants[name]))
        return bool(self.states)

    def step(self) -> list[tuple[TenantState, Tensor]]:
        """Make one optimizer step for every tenant in a slot; return the tenants that ended, with their kept cores."""
        started = time.perf_counter()
        rows = [state.tenant.step_rows(state.step) for state in self.states]
        losses, norms = self._gradients(rows)
        for state, loss, norm in zip(self.states, losses.tolist(), norms.tolist(), strict=True):
            if not math.isfinite(loss) or not math.isfinite(norm):  # as in a run alone (LossMonitor)
                state.diverged = divergence(
                    state.step + 1, state.tenant.num_steps, loss, norm, state.tenant.recipe.learning_rate
                )
        last_good = {  # copied, because the step below overwrites them
            state.name: self.slots.sound[slot].clone() for slot, state in enumerate(self.states) if state.diverged
        }
        recipes = [state.tenant.recipe for state in self.states]
        self.slots.step(
            norms,
            rates=[state.tenant.recipe.rate(state.step, state.tenant.num_steps) for state in self.states],
            counts=[state.step + 1 for state in self.states],
            largest_norms=[recipe.max_grad_norm for recipe in recipes],
            decays=[recipe.weight_decay for recipe in recipes],
        )
        self.num_steps += 1
        sizes = [sum(len(row.input_ids) for row in of_tenant) for of_tenant in rows]
        share_s = (time.perf_counter() - started) / sum(sizes)
        for state, loss, size in zip(self.states, losses.tolist(), sizes, strict=True):
            if not state.diverged:
                state.losses.append(loss)
            state.steps_s.append(share_s * size)
        self._score()
        return self._leave(last_good)

    def _gradients(self, rows: list[list[TokenRow]]) -> tuple[Tensor, Tensor]:
        """Compute the loss of each tenant and leave its gradient in its slot; return losses and gradient norms."""
        flat = [row for of_tenant in rows for row in of_tenant]
        slot_of = [slot for slot, of_tenant in enumerate(rows) for _ in of_tenant]
        losses = torch.zeros(len(rows), device=self.slots.device)
        costs, most = row_costs(row_sizes(self.model, flat), self.slots.device, self.tokens_per_batch)
        counts = [sum(row.num_targets for row in of_tenant) for of_tenant in rows]
        weights = [1 / counts[slot] if counts[slot] else math.nan for slot in slot_of]  # a step's loss is a mean
        lengths, limit = [len(row.input_ids) for row in flat], rope_limit(self.model)
        while True:
            groups = group_by_length(costs, most // self._shrink, self._pass_tokens)
            groups = on_one_side(groups, lengths, limit)
            work = partial(self._passes, groups, flat, slot_of, weights, losses)
            if all(len(group) == 1 for group in groups):
                work()
                break
            if fits(work):
                break
            self.slots.gradients.zero_()
            losses.zero_()
            self._shrink *= 2
        return losses, self.slots.gradient_norms(len(rows))

    def _passes(
        self,
        groups: list[list[int]],
        rows: list[TokenRow],
        slot_of: list[int],
        weights: list[float],
        losses: Tensor,
    ) -> None:
        collate, device = PaddingCollator(self.pad_id), losses.device
        for group in groups:
            batch = {name: tensor.to(device) for name, tensor in collate([rows[i] for i in group]).items()}
            slots, factors = [slot_of[i] for i in group], torch.tensor([weights[i] for i in group], device=device)
            means, gradients = self.slots.row_gradients(slots, partial(_weighted_losses, self.model, batch, factors))
            places = torch.tensor(slots, device=device)
            self.slots.gradients.index_add_(0, places, gradients)
            losses.index_add_(0, places, means)

    def _score(self) -> None:
        """Score the tenants that are due on their validation rows."""
        due = [
            slot for slot, state in enumerate(self.states) if not state.diverged and state.tenant.is_scored(state.step)
        ]
        if not due:
            return
        started = time.perf_counter()
        sets = [chosen.rows for slot in due if (chosen := self.states[slot].tenant.validation)]
        losses = held_out_losses(
            self.model,
            sets,
            pad_id=self.pad_id,
            through=lambda of_rows: self.slots.rows([due[i] for i in of_rows]),
            tokens_per_batch=self.tokens_per_batch,
        )
        share_s = (time.perf_counter() - started) / sum(map(len, sets))
        for slot, rows, loss in zip(due, sets, losses, strict=True):
            self._note(slot, loss, share_s * len(rows))

    def _note(self, slot: int, loss: float, time_s: float) -> None:
        state = self.states[slot]
        state.scoring_s += time_s
        if math.isfinite(loss):
            state.scored(loss, self.slots.values[slot])
        else:
            state.diverged = f"Training diverged at step {state.step}: the loss on validation rows is {loss}."

    def _leave(self, last_good: Mapping[str, Tensor]) -> list[tuple[TenantState, Tensor]]:
        """Remove the tenants that have ended and return them with the cores to keep; the last slot fills a free one."""
        gone = []
        for slot in reversed(range(len(self.states))):
            state = self.states[slot]
            if state.has_ended:
                kept = self.slots.values[slot] if state.best is None else state.best
                if state.diverged:
                    kept = last_good.get(state.name, self.slots.sound[slot])
                gone.append((state, kept.clone()))
                if slot < len(self.states) - 1:
                    self.slots.move(len(self.states) - 1, slot)
                    self.states[slot] = self.states[-1]
                self.states.pop()
        return gone[::-1]


def _weighted_losses(model: nn.Module, batch: dict[str, Tensor], weights: Tensor) -> Tensor:
    return row_losses(model, batch) * weights
