"""Train many tenants together: each step's batches hold the next rows of every tenant in a slot.

Tenants do not affect one another: each tenant's rows use its own core, its loss is the mean over its own tokens, and
clipping, learning rate and moments belong to its slot. The result is the same as training alone, except for rounding. A
tenant that ends, stops early or diverges gives its slot to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.calibration.preserve import own_random_state, plain_passes
from frozencore.errors import ConfigError
from frozencore.text import Progress
from frozencore.tune.many.slots import TrainedSlots
from frozencore.tune.many.tenant import ActiveTenants, Tenant, TenantState, Trained
from frozencore.tune.scoring.forward import base_of
from frozencore.tune.training.trainer import own_use_cache

SLOTS = 64

OnEnd = Callable[[Mapping[str, Trained]], object]


def train_many(
    model: nn.Module,
    tenants: Mapping[str, Tenant],
    on_end: OnEnd,
    *,
    pad_id: int,
    adapter_name: str = "default",
    num_slots: int = SLOTS,
    tokens_per_batch: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Train a core for each tenant on the basis of one adapter.

    Every tenant starts from a copy of the adapter's core; the adapter's own core does not change.
    The model is left in evaluation mode; the global random state is restored.

    Args:
        on_end: Called with the tenants that ended in a step, at most :data:`SLOTS` of them, so that their cores need
            not be held. A tenant that diverged is marked and does not stop others.
        num_slots: Tenants that train at once, those with the most steps first. A slot takes ``12·Σr²`` bytes and
            ``4·Σr²`` for the gradient.
        tokens_per_batch: Tokens of one forward pass; None fills the device.

    Raises:
        ConfigError: No adapter of that name, no basis, or the adapter trains more than cores.
    """
    if num_slots < 1:
        raise ConfigError(f"Tenants train in at least one slot, got {num_slots}.")
    if not tenants:
        return
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules()):
        raise ConfigError(
            "Tenants share all but their cores, so an adapter with modules_to_save or trainable_token_indices "
            "trains alone: leave these out of its configuration."
        )
    slots = TrainedSlots(model, min(num_slots, len(tenants)), adapter_name=adapter_name)
    active = ActiveTenants(model, tenants, slots, pad_id=pad_id, tokens_per_batch=tokens_per_batch)
    with ExitStack() as restored:
        restored.enter_context(own_random_state())
        restored.enter_context(plain_passes(model))
        restored.enter_context(own_use_cache(model))
        base_of(model).config.use_cache = False
        restored.callback(model.eval)
        model.train()
        while active.fill():
            ended = active.step()
            for first in range(0, len(ended), SLOTS):
                on_end({state.name: _trained(slots, state, kept) for state, kept in ended[first : first + SLOTS]})
            if progress is not None:
                progress("train", *active.progress)


def _trained(slots: TrainedSlots, state: TenantState, values: Tensor) -> Trained:
    report = replace(state.report(), state_held_bytes=slots.state_held_bytes)
    return Trained({} if state.diverged else slots.by_layer(values.cpu()), report, state.diverged)
