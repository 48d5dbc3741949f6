"""Cores that train together, with AdamW over all of them at once.

    m ← β₁ m + (1 - β₁) g,    v ← β₂ v + (1 - β₂) g²,    R ← (1 - η λ) R - η m̂ / (√v̂ + ε)

η, λ, the step count and the clipping factor are one number a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.mixed_batch import base_rows, other_modules, rows_through
from frozencore.adapter.saved.state import by_layer
from frozencore.errors import ConfigError
from frozencore.tune.training.callbacks import total_bytes


class CoreStack:
    """A stack of cores for the rows of a batch.

    Args:
        model: A model with a frozen-core adapter; all cores use its P, Q and scale. Its own core is not changed.

    Raises:
        ConfigError: There is no such adapter, it has no basis or is merged, or its cores are not float32 on one device.
    """

    def __init__(self, model: nn.Module, num_slots: int, *, adapter_name: str = "default") -> None:
        self.adapter_name = adapter_name
        self.layers = frozen_core_layers(model, adapter_name)
        if not self.layers:
            raise ConfigError(f"Many cores need a frozen-core adapter, but the model has none called {adapter_name!r}.")
        self.others = other_modules(model, self.layers)
        own = {name: layer.factors(adapter_name)[2].detach() for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.require_basis(adapter_name)
            if layer.merged:
                raise ConfigError(f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() first.")
        kinds = sorted({f"{R.dtype} on {R.device}" for R in own.values()})
        if len(kinds) > 1 or not kinds[0].startswith("torch.float32 "):
            raise ConfigError(
                f"Cores that train together are float32 and on one device, but these are {' and '.join(kinds)}."
            )
        self.ranks = {name: len(R) for name, R in own.items()}
        self.start = torch.cat([R.flatten() for R in own.values()])
        self.device = self.start.device
        self.values = torch.zeros(num_slots, len(self.start), device=self.device)
        self.cores = {name: view.detach() for name, view in self.by_layer(self.values).items()}

    def __len__(self) -> int:
        return len(self.values)

    def by_layer(self, flat: Tensor) -> dict[str, Tensor]:
        """Views (..., r, r) of contiguous values (..., Σr²)."""
        return by_layer(flat, self.ranks)

    def put(self, slot: int, cores: Mapping[str, Tensor]) -> None:
        """Fill a slot with R (r x r) of each layer."""
        self.values[slot] = torch.cat([cores[name].flatten() for name in self.ranks]).to(self.device)

    def rows(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Use the core of its slot for each row of a batch."""
        places = torch.tensor(slots, device=self.device)
        return self._through({name: core[places] for name, core in self.cores.items()})

    @contextmanager
    def _through(self, cores: Mapping[str, Tensor]) -> Iterator[None]:
        """Use its own core (rows x r x r) of each layer for each row of a batch."""
        with ExitStack() as undo:
            for name, layer in self.layers.items():
                undo.enter_context(rows_through(layer, layer.row_cores_of(self.adapter_name, cores[name])))
            num_rows = len(next(iter(cores.values())))
            undo.enter_context(base_rows(self.others, lambda _: num_rows))
            yield


BETAS, EPSILON = (0.9, 0.999), 1e-8  # as the Trainer's
CLIP_EPSILON = 1e-6  # as torch's clip_grad_norm_


class TrainedSlots(CoreStack):
    """A :class:`CoreStack` with gradients and moments; the used slots come first."""

    def __init__(self, model: nn.Module, num_slots: int, *, adapter_name: str = "default") -> None:
        super().__init__(model, num_slots, adapter_name=adapter_name)
        self.gradients, self.first, self.second, self.sound = (torch.zeros_like(self.values) for _ in range(4))

    def state(self) -> dict[str, Tensor]:
        """The state for resuming: cores, moments, and the last cores with finite loss."""
        return {"values": self.values, "first": self.first, "second": self.second, "sound": self.sound}

    @property
    def state_held_bytes(self) -> int:
        """The training state of one slot: its gradient and moments."""
        return total_bytes((self.gradients, self.first, self.second)) // len(self)

    def clear(self, slot: int) -> None:
        """Reset a slot for a new tenant: the adapter's own core, zero moments."""
        for state in (self.gradients, self.first, self.second):
            state[slot].zero_()
        self.values[slot] = self.start
        self.sound[slot] = self.start

    def move(self, source: int, target: int) -> None:
        """Move a tenant to another slot, between two steps."""
        for state in self.state().values():
            state[target] = state[source]

    def row_gradients(self, slots: Sequence[int], losses: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the loss of each row (rows) and its own gradient (rows x Σr²); each row uses a copy of its core.

        Args:
            slots: The slot of each row.
            losses: Runs the model on the batch.
        """
        places = torch.tensor(slots, device=self.device)
        copies = {name: core[places].requires_grad_() for name, core in self.cores.items()}
        with self._through(copies):
            found = losses()
            gradients = torch.autograd.grad(found.sum(), list(copies.values()), materialize_grads=True)
        return found.detach(), torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)

    def gradient_norms(self, num_used: int) -> Tensor:
        """The norm of each slot's gradient over all layers."""
        return torch.linalg.vector_norm(self.gradients[:num_used], dim=1)

    def step(
        self,
        norms: Tensor,
        *,
        rates: Sequence[float],
        counts: Sequence[int],
        largest_norms: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        """Make one step on the first slots, and zero their gradients. Each argument has one number a slot.

        Args:
            norms: Norms of the gradients.
            rates: η.
            counts: Number of steps, including this one.
            largest_norms: The norm to which the gradient is clipped.
            decays: λ.
        """
        used = len(norms)
        values, g, m, v = (state[:used] for state in (self.values, self.gradients, self.first, self.second))
        (beta1, beta2), column = BETAS, self._column
        self.sound[:used].copy_(values)
        g.mul_((column(largest_norms) / (norms.unsqueeze(1) + CLIP_EPSILON)).clamp_(max=1.0))
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if any(decays):
            values.mul_(column([1 - rate * decay for rate, decay in zip(rates, decays, strict=True)]))
        torch.sqrt(v, out=g)  # reuses the gradient's memory
        g.div_(column([(1 - beta2**count) ** 0.5 for count in counts])).add_(EPSILON)
        torch.div(m, g, out=g)
        g.mul_(column([rate / (1 - beta1**count) for rate, count in zip(rates, counts, strict=True)]))
        values.sub_(g)
        g.zero_()

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=self.device).unsqueeze(1)
