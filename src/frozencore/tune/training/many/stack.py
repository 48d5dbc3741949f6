"""Cores on one basis side by side: slots x Σr² values, of which each layer multiplies with slots x r x r of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import frozen_core_layers
from frozencore.adapter.mixed_batch import rows_through
from frozencore.adapter.saved.tensors import by_layer
from frozencore.errors import ConfigError


class CoreStack:
    """So many cores for the rows of a batch.

    Args:
        model: With a frozen-core adapter, whose P, Q and scale are those of every core; its own core is not changed.

    Raises:
        ConfigError: There is no such adapter, it has no basis or is merged, or its cores are not float32 on one device.
    """

    def __init__(self, model: nn.Module, num_slots: int, *, adapter_name: str = "default") -> None:
        self.adapter_name = adapter_name
        self.layers = frozen_core_layers(model, adapter_name)
        if not self.layers:
            raise ConfigError(f"Many cores need a frozen-core adapter, but the model has none called {adapter_name!r}.")
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
        """Views (..., r, r) of what lies side by side (..., Σr²)."""
        return by_layer(flat, self.ranks)

    def put(self, slot: int, cores: Mapping[str, Tensor]) -> None:
        """Fill a slot with R (r x r) of each layer."""
        self.values[slot] = torch.cat([cores[name].flatten() for name in self.ranks]).to(self.device)

    @contextmanager
    def rows(self, slots: Sequence[int]) -> Iterator[None]:
        """Send each row of a batch through the core of its slot."""
        places = torch.tensor(slots, device=self.device)
        with ExitStack() as undo:
            for name, layer in self.layers.items():
                undo.enter_context(rows_through(layer, layer.row_cores_of(self.adapter_name, self.cores[name][places])))
            yield
