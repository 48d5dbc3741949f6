"""The state that a training holds: bytes of live tensors from one step to the next, beside what it trains.

Counted: gradients, the optimiser's states (the projections of GaLore and APOLLO among them), and what training in
rounds holds: sums or sketches of moments, the factors of earlier rounds, copies of weights.

Not counted: the base model, the values that train, the basis that they train on, activations, step counters, and the
copies of what trains that a run keeps to go back to (the last good values and the best ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from frozencore.adapter.bases.in_rounds import InRounds

DEPTH = 4  # of containers and objects in an optimiser's states


class StateHeld(TrainerCallback, ExportableState):
    """Measures the state held while training, at its peak.

    It looks right after an optimiser step, when gradients are still there: after the first step, the last step of each
    round, and the last of all. Within a round nothing is freed, so its last step holds the most of it; between two of
    these steps nothing else changes size. What choosing new bases takes for a moment is not held from step to step; the
    record's memory of each phase has it.

    Attributes:
        peak_bytes: The largest so far, that of the checkpoint included that the training goes on from.
    """

    def __init__(self, model: nn.Module, rounds: InRounds | None = None) -> None:
        self.model, self.rounds = model, rounds
        self.peak_bytes = 0
        self._looks_at: set[int] = set()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"peak_bytes": self.peak_bytes}}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        kept: Any = (state.stateful_callbacks or {}).get(type(self).__name__)
        if isinstance(kept, dict):
            self.peak_bytes = max(self.peak_bytes, int(kept["attributes"]["peak_bytes"]))
        ends = self.rounds.round_ends(state.max_steps) if self.rounds is not None else ()
        self._looks_at = {state.global_step + 1, *ends, state.max_steps}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step + 1 in self._looks_at:
            held = self.rounds.held_tensors() if self.rounds is not None else ()
            now = total_bytes([*gradients_of(self.model), *states_of(kwargs["optimizer"]), *held])
            self.peak_bytes = max(self.peak_bytes, now)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; those that begin at the same place are one, and single numbers are counters."""
    return sum({(str(one.device), one.data_ptr()): one.nbytes for one in tensors if one.ndim and one.numel()}.values())


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """Of every parameter that has one."""
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimiser's states, also those inside objects of its own."""
    return _tensors_in(list(optimizer.state.values()), DEPTH)


def _tensors_in(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        inside: Iterable[object] = ()
        if isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, list | tuple):
            inside = value
        elif hasattr(value, "__dict__"):
            inside = vars(value).values()
        for part in inside:
            yield from _tensors_in(part, depth - 1)
