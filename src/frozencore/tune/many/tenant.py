"""Train many tenants together: each step's batches hold the next rows of every tenant in a slot.

Tenants do not affect one another: each tenant's rows use its own core, its loss is the mean over its own tokens, and
clipping, learning rate and moments belong to its slot. The result is the same as training alone, except for rounding. A
tenant that ends, stops early or diverges gives its slot to the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from frozencore.adapter.core import Core
from frozencore.attributes import with_attributes
from frozencore.calibration.preserve import own_random_state, without_randomness
from frozencore.device import run_unless_oom
from frozencore.errors import TrainingError
from frozencore.maths.linalg import all_finite
from frozencore.progress import Progress, no_progress
from frozencore.tune.many.slots import TrainedSlots, held_out_losses
from frozencore.tune.many.unfinished import Unfinished
from frozencore.tune.record import StepScored, TrainedSteps
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import PaddingCollator, row_costs
from frozencore.tune.scoring.forward import row_losses, row_sizes
from frozencore.tune.training.callbacks import (
    Every,
    best_score,
    divergence,
    is_due,
    is_patience_lost,
    selected,
)
from frozencore.tune.training.checkpoints import Stop, defer_stop
from frozencore.tune.training.recipe import Recipe
from frozencore.tune.training.train import TrainingReport
from frozencore.tune.training.trainer import group_by_length, overhead_tokens_of
from frozencore.unwrapped_model import base_of


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


@dataclass(frozen=True)
class Tenant:
    """The rows and the recipe of one core, which determine its steps."""

    rows: Sequence[TokenRow]
    recipe: Recipe
    validation: Validation | None = None

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
        core: The last core or the selected one, float32 on the CPU; None after a divergence.
        report: Steps and losses; seconds are the tenant's share of each step, by tokens.
        diverged: The reason in one line if it diverged; None otherwise.
        warnings: Those of the rounding of its core.
    """

    core: Core | None
    report: TrainingReport
    diverged: str | None = None
    warnings: tuple[str, ...] = ()


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
    scores: list[StepScored] = field(default_factory=list)
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
        self.scores.append(StepScored(step=self.step, held_out_loss=loss, accuracy=None))
        if best_score(self.scores) is self.scores[-1]:
            self.best = values.clone()

    def unfinished(self, of_slot: Mapping[str, Tensor]) -> Unfinished:
        """The state with what the tenant's slot holds."""
        best = {} if self.best is None else {"best": self.best}
        return Unfinished({**of_slot, **best}, self.losses, self.steps_s, self.scores, self.scoring_s)

    def go_on(self, before: Unfinished) -> None:
        """Take the steps that were done before."""
        self.losses, self.steps_s = list(before.losses), list(before.steps_s)
        self.scores, self.scoring_s, self.best = list(before.scores), before.scoring_s, before.tensors.get("best")

    def report(self, state_held_bytes: int, num_trainable: int) -> TrainingReport:
        chosen, validation = None, self.tenant.validation
        if self.scores and self.diverged is None and validation is not None:
            is_early = self.step < self.tenant.num_steps
            chosen = selected(validation.every, len(validation.rows), self.scores, self.scoring_s, is_early=is_early)
        return TrainingReport(
            training=TrainedSteps.of(self.losses),
            time_s=sum(self.steps_s),
            step_s=median(self.steps_s) if self.steps_s else None,
            resumed_from=None,
            selected=chosen,
            state_held_bytes=state_held_bytes,
            num_trainable=num_trainable,
        )


class ActiveTenants:
    """The tenants in slots, in order, and the names that wait for a slot."""

    def __init__(
        self,
        model: nn.Module,
        tenants: Mapping[str, Tenant],
        slots: TrainedSlots,
        begun: Mapping[str, Unfinished],
        *,
        pad_id: int,
    ) -> None:
        self.model, self.tenants, self.slots, self.begun, self.pad_id = model, tenants, slots, begun, pad_id
        self.states: list[TenantState] = []
        self._num_steps = sum(tenant.num_steps for tenant in tenants.values())
        self._waiting_steps = self._num_steps
        longest_first = sorted(tenants, key=lambda name: -tenants[name].num_steps)
        self.waiting = longest_first[::-1]  # the next is at the end
        self._shrink, self._overhead_tokens = 1, overhead_tokens_of(model)

    def fill(self) -> bool:
        """Give free slots to waiting tenants; False if all have ended."""
        while self.waiting and len(self.states) < len(self.slots):
            name = self.waiting.pop()
            self._waiting_steps -= self.tenants[name].num_steps
            slot, state = len(self.states), TenantState(name, self.tenants[name])
            if (before := self.begun.get(name)) is None:
                self.slots.clear(slot)
            else:
                self.slots.put(slot, before.tensors)
                state.go_on(before)
            self.states.append(state)
        return bool(self.states)

    def unfinished(self) -> dict[str, Unfinished]:
        """The tenants in slots that have made a step, to go on from later."""
        states = {slot: state for slot, state in enumerate(self.states) if state.step}
        return {state.name: state.unfinished(self.slots.tensors(slot)) for slot, state in states.items()}

    @property
    def progress(self) -> tuple[int, int, str]:
        """Steps done and total steps of all tenants, and a text with the mean loss."""
        ended = len(self.tenants) - len(self.waiting) - len(self.states)
        note = f"steps of all tenants; {ended} of {len(self.tenants)} have ended"
        if losses := [state.losses[-1] for state in self.states if state.losses]:
            note += f", {len(self.states)} train at loss {sum(losses) / len(losses):.3f}"
        to_do = self._waiting_steps + sum(state.tenant.num_steps - state.step for state in self.states)
        return self._num_steps - to_do, self._num_steps, note

    def step(self) -> list[tuple[TenantState, Tensor]]:
        """Make one optimizer step for every tenant in a slot; return the tenants that ended, with their kept cores."""
        started = time.perf_counter()
        rows = [state.tenant.step_rows(state.step) for state in self.states]
        losses, norms = self._gradients(rows)
        for state, loss, norm in zip(self.states, losses.tolist(), norms.tolist(), strict=True):
            if not math.isfinite(loss) or not math.isfinite(norm):  # as in a run alone (LossMonitor)
                state.diverged = divergence(
                    state.step + 1, state.tenant.num_steps, loss, norm, state.tenant.recipe.peak_rate
                )
        self.slots.step(
            norms,
            rates=[state.tenant.recipe.rate(state.step, state.tenant.num_steps) for state in self.states],
            counts=[state.step + 1 for state in self.states],
        )
        sizes = [sum(len(row.input_ids) for row in of_tenant) for of_tenant in rows]
        share_s = (time.perf_counter() - started) / sum(sizes)
        for state, loss, size in zip(self.states, losses.tolist(), sizes, strict=True):
            if not state.diverged:
                state.losses.append(loss)
            state.steps_s.append(share_s * size)
        self._score()
        return self._leave()

    def _gradients(self, rows: list[list[TokenRow]]) -> tuple[Tensor, Tensor]:
        """Compute the loss of each tenant and leave its gradient in its slot; return losses and gradient norms."""
        flat = [row for of_tenant in rows for row in of_tenant]
        slot_of = [slot for slot, of_tenant in enumerate(rows) for _ in of_tenant]
        losses = torch.zeros(len(rows), device=self.slots.device, dtype=torch.float64)
        costs, most = row_costs(row_sizes(self.model, flat), self.slots.device)
        counts = [sum(row.num_targets for row in of_tenant) for of_tenant in rows]
        weights = [1 / counts[slot] if counts[slot] else math.nan for slot in slot_of]  # a step's loss is a mean
        while True:
            groups = group_by_length(costs, most // self._shrink, self._overhead_tokens)
            work = partial(self._passes, groups, flat, slot_of, weights, losses)
            if all(len(group) == 1 for group in groups):
                work()
                break
            if run_unless_oom(work):
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
            with_cores=lambda of_rows: self.slots.of_slots([due[i] for i in of_rows]),
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

    def _leave(self) -> list[tuple[TenantState, Tensor]]:
        """Remove the tenants that have ended and return them with the cores to keep; the last slot fills a free one."""
        gone = []
        for slot in reversed(range(len(self.states))):
            state = self.states[slot]
            if state.has_ended:
                gone.append((state, self.slots.values[slot].clone() if state.best is None else state.best))
                if slot < len(self.states) - 1:
                    self.slots.move(len(self.states) - 1, slot)
                    self.states[slot] = self.states[-1]
                self.states.pop()
        return gone[::-1]


def _weighted_losses(model: nn.Module, batch: dict[str, Tensor], weights: Tensor) -> Tensor:
    return row_losses(model, batch) * weights


SLOTS = 64
NOTHING_BEGUN: Mapping[str, Unfinished] = {}

OnEnd = Callable[[Mapping[str, Trained]], object]


def train_many(
    model: nn.Module,
    tenants: Mapping[str, Tenant],
    on_end: OnEnd,
    *,
    pad_id: int,
    num_slots: int = SLOTS,
    progress: Progress = no_progress,
    begun: Mapping[str, Unfinished] = NOTHING_BEGUN,
    on_stop: Callable[[Mapping[str, Unfinished]], str] | None = None,
) -> None:
    """Train a core for each tenant on the basis of the model's adapter.

    Every tenant starts from a copy of the adapter's core; the adapter's own core does not change.
    The model is left in evaluation mode; the global random state is restored.

    Args:
        on_end: Called with the tenants that ended in a step, at most :data:`SLOTS` of them, so that their cores need
            not stay in memory. A tenant that diverged is marked and does not stop others.
        num_slots: Tenants that train at once, those with the most steps first. A slot takes ``12·Σr²`` bytes and
            ``4·Σr²`` for the gradient.
        begun: Tenants that go on from earlier steps.
        on_stop: Saves the tenants in slots after the running step when Ctrl-C, SIGTERM or SIGHUP ends the training, and
            says what it saved. Without it a signal acts at once.

    Raises:
        ConfigError: No adapter, no basis, or the adapter trains more than cores.
        TrainingError: It was told to stop, by a signal whose own handler raises nothing.
    """
    if not tenants:
        return
    slots = TrainedSlots(model, min(num_slots, len(tenants)))
    active = ActiveTenants(model, tenants, slots, begun, pad_id=pad_id)
    with ExitStack() as restored:
        stop = restored.enter_context(defer_stop()) if on_stop else Stop()
        restored.enter_context(own_random_state())
        restored.enter_context(without_randomness(model))
        restored.enter_context(with_attributes(base_of(model).config, use_cache=False))
        restored.callback(model.eval)
        model.train()
        while active.fill():
            if on_stop is not None and stop():
                stop.saved = on_stop(active.unfinished())
                break
            ended = active.step()
            for first in range(0, len(ended), SLOTS):
                on_end({state.name: _trained(slots, state, kept) for state, kept in ended[first : first + SLOTS]})
            progress("train", *active.progress)
    if stop.saved is not None:  # the signal's own handler did not end the program
        raise TrainingError(f"The training was told to stop; {stop.saved}. Go on with `tune-many --resume`.")


def _trained(slots: TrainedSlots, state: TenantState, values: Tensor) -> Trained:
    if state.diverged is None and not all_finite(values):
        state.diverged = f"Training diverged at step {state.step}, the last one: its core is not finite."
    report = state.report(slots.state_held_bytes, values.numel())
    core = None if state.diverged else Core(slots.basis_id, values.cpu())
    return Trained(core, report, state.diverged)
