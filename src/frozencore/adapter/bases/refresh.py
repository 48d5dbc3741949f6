"""Refreshing: train a frozen core in rounds, each on a new basis from the moments of the training so far.

    y = W x + s·Σ_j P_j R_j Q_jᵀ x,   R_j trained in round j alone, from zero

The trained values and their optimizer state always have size Σr². The moments are summed over the training batches; a
share of the older sums is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

from frozencore.adapter.bases.access import adapter_for_new_bases
from frozencore.adapter.bases.in_rounds import InRounds
from frozencore.adapter.bases.passes import BasisWork
from frozencore.adapter.bases.refresh_plan import (
    COST,
    held_in_rounds,
    rounds_for,
    share_to_gather,
    sums_bytes,
    widths_within,
)
from frozencore.calibration.layer_owners import assign_owners, reduce_moments, require_same_bases, share_bases
from frozencore.calibration.training_moments import SketchedMoments, TrainingMoments
from frozencore.errors import ConfigError
from frozencore.maths.linalg import Shape
from frozencore.ranks import own_rank

KEPT = 0.5  # the share of the older moments that a refresh keeps


class Refresh(InRounds):
    """A callback of transformers' ``Trainer`` (and TRL's) that refreshes a frozen-core adapter.

    ``Trainer(model, ..., callbacks=[Refresh(model, rounds=8)])``. The steps are split into equal rounds. Between two
    rounds the core is added to a sum that no longer trains, and new bases are built from the moments so far. The next
    core starts at zero, with fresh optimizer state and a short warm-up; one learning rate schedule covers all rounds.
    The adapter ends with rank ``rounds * r``. It saves, loads, merges and exports like any other, but cannot share its
    basis.

    Args:
        model: A model with a frozen-core adapter that has its first bases.
        rounds: A number from 1 (no refreshing) to the number of steps; ``auto`` chooses a useful number
            (:func:`frozencore.adapter.bases.refresh_plan.rounds_for`).
        cost: The extra products for summing moments, as a share of the training's. It decides in how many steps
            moments are summed; 0.5 or more means every step.
        memory_budget: The memory for choosing new bases, beside the earlier rounds: ``"128 MB"`` or a number of bytes.
            Sums are exact if they fit, else sketches as wide as fit (docs/refreshing.md).
        adapter_name: The active adapter by default.

    Attributes:
        rounds: The number of rounds; ``auto`` becomes a number when the training starts.
        widths: Columns of each layer's sketch; None if sums are exact.
        share: The share of the steps that are summed.

    Raises:
        ConfigError: The model has no such adapter, or it cannot be refreshed: it shares its basis, or its constructor
            reads no data.
    """

    def __init__(
        self,
        model: nn.Module,
        rounds: int | Literal["auto"],
        *,
        cost: float = COST,
        memory_budget: int | str | None = None,
        adapter_name: str | None = None,
    ) -> None:
        if rounds != "auto" and (not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1):
            raise ConfigError(
                f'A training has at least one round, or as many as "auto" finds, but rounds={rounds!r:.50} came.'
            )
        if not cost > 0:
            raise ConfigError(f"cost is a share above 0, but {cost!r:.50} came. Leave it out for the default.")
        self.model = model
        self.asked, self.rounds = rounds, 1 if rounds == "auto" else rounds
        self.adapter_name, self.config, self.layers = adapter_for_new_bases(model, adapter_name, reset=True)
        if rounds != 1 and self.config.basis_id is not None:
            raise ConfigError(
                "Refreshing changes the basis, and this adapter shares its own with others. Train without refresh, or "
                "calibrate a basis for this adapter alone."
            )
        if rounds != 1 and not self.config.needs_calibration:
            raise ConfigError(
                f"Refreshing chooses bases by the training data, which {self.config.constructor!r} does not read. "
                "Use a constructor that does, such as fcca, or train without refresh."
            )
        for layer in self.layers.values():
            (layer.refreshed.add if rounds != 1 else layer.refreshed.discard)(self.adapter_name)
        self.widths = widths_within(memory_budget, self._shapes, self._ranks, self.config) if rounds != 1 else None
        self._sums: TrainingMoments | None = None
        self.share = share_to_gather(model, self._shapes, cost, self.widths)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._stop_summing()

    @property
    def round_now(self) -> int:
        return self.config.rounds

    @property
    def earlier_values(self) -> int:
        return (self.config.rounds - 1) * sum(rank**2 for rank in self._ranks.values())

    def foreseen_bytes(self, rounds: int) -> int:
        """An estimate of the peak of :meth:`state_tensors` in a training of that many rounds."""
        sums = sums_bytes(self._shapes, self._ranks, self.widths, self.config)
        weights = next(iter(self.layers.values())).frozencore_P[self.adapter_name].dtype
        return held_in_rounds(self._shapes, self._ranks, sums, rounds, weights)

    def state_tensors(self) -> Iterator[Tensor]:
        """Sums or sketches of moments, and the tensors of earlier rounds."""
        if self._sums is not None:
            yield from self._sums.state().values()
        for layer in self.layers.values():
            yield from layer.tensors_of_past(self.adapter_name)

    def choose_rounds(self, args: TrainingArguments, state: TrainerState) -> None:
        if self.asked == "auto":
            rows_a_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            self.rounds = rounds_for(rows_a_step * state.max_steps, state.max_steps, self.share)

    def begin(self, args: TrainingArguments, state: TrainerState) -> None:
        if self.rounds > 1 and self.round_ends(state.max_steps)[0] <= self._num_leading:
            raise ConfigError(
                "Sketches of moments need a first round of at least two steps, but its length is one with "
                f"refresh={self.rounds} and {state.max_steps} steps. Train in fewer rounds or give a larger "
                "memory_budget."
            )
        if self.config.rounds == self.rounds:
            return
        self.gather()
        if state.global_step > 0 and self._sums is not None:
            self._sums.load_state(self.saved_state(args, state))

    def before_step(self, state: TrainerState) -> None:
        """Turn summing on or off for this step."""
        if self._sums is None:
            return
        step = state.global_step - (self._begun_at or self._num_leading)  # the first step of each round is summed
        if isinstance(self._sums, SketchedMoments) and self._sums.awaits_metric and step == 0:
            self._sums.set_metric()
        self._sums.listen(on=step < 0 or math.floor(step * self.share) > math.floor((step - 1) * self.share))

    def state_to_save(self) -> dict[str, Tensor]:
        return {} if self._sums is None else self._sums.state()

    def take_back_round(self) -> None:
        """Drop the adapter's last round; the moments are not restored."""
        for layer in self.layers.values():
            layer.take_back_round(self.adapter_name)
        self.config.rounds -= 1

    @property
    def sums_now(self) -> bool:
        """Return whether the next batches are summed."""
        return self._sums is not None and self._sums.capture.listens

    def _stop_summing(self) -> None:
        if self._sums is not None:
            self._sums.close()
            self._sums = None

    @property
    def _num_leading(self) -> int:
        """The number of steps that only measure the metric of the sketches."""
        return int(self.widths is not None and (metric := self.config.metric) is not None and bool(metric.needs()))

    @property
    def _shapes(self) -> dict[str, Shape]:
        return {name: layer.shape for name, layer in self.layers.items()}

    @property
    def _ranks(self) -> dict[str, int]:
        return {name: len(layer.core(self.adapter_name)) for name, layer in self.layers.items()}

    def gather(self) -> None:
        """Sum the moments of the batches from now on."""
        layers, metric = dict(self.layers.items()), self.config.metric
        if self.widths is None or metric is None:
            self._sums = TrainingMoments(self.model, layers, self.config.needs)
        else:
            self._sums = SketchedMoments(self.model, layers, shapes=self._shapes, widths=self.widths, whitening=metric)

    def next_round(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the core to the sum, and start the next core from zero on bases of the gathered moments, on all ranks.

        Raises:
            CalibrationError: The moments are not finite, or another rank failed.
        """
        assert self._sums is not None
        owners = assign_owners(self._shapes)
        work = BasisWork(
            self.model, self.adapter_name, self.config, self.layers, owners, lambda *_: None, captures_asked=False
        )
        if isinstance(self._sums, SketchedMoments):
            work.build_streamed(self._sums.next_round(self._ranks, KEPT))
        else:
            moments = reduce_moments(self._sums.moments(), owners)
            work.build(self.layers, dict(moments))
            self._sums.keep(KEPT, {name: m for name, m in moments.items() if owners[name] == own_rank()})
        bases = share_bases(work.bases, owners, {name: work.like_factors(name) for name in self.layers})
        require_same_bases({name: (basis.P, basis.Q) for name, basis in bases.items()})
        for name, layer in self.layers.items():
            layer.begin_round(self.adapter_name, bases[name])
            optimizer.state.pop(layer.core(self.adapter_name), None)
        self.config.rounds += 1
        if self.config.rounds == self.rounds:
            self._stop_summing()
