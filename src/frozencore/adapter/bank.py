"""A bank of cores: thousands of tenants on one basis in one loaded model; each row of a batch uses its own core.

    y += s·P(R[slot] Qᵀx)

The cores of a slot are contiguous (Σr² values), so that one copy adds a tenant. The cores of a batch's rows are
gathered once, when the batch begins. Slot 0 is zero and stands for the base model. Batches of all sizes use the memory
of the largest one so far. Until a larger one comes the rows' cores stay at their addresses, so CUDA graphs stay valid.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.mixed_batch import base_rows, encoder_modules, other_modules, rows_through
from frozencore.adapter.saved.state import by_layer, require_finite_in
from frozencore.adapter.swap import held_bases, read_cores, require_unmoved
from frozencore.errors import ConfigError
from frozencore.quiet import with_attributes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CoreBank:
    """Cores by name on the basis of one loaded adapter, up to a fixed number.

    A running batch keeps the cores that it started with, even if they are replaced or evicted. ``put``, ``evict`` and
    look-ups may be called from any thread; only one batch runs at a time. A batch inside another one has its own rows;
    the outer one then goes on with its own.

    Args:
        model: A model with a frozen-core adapter. Its P, Q and scale serve every core; rows of the bank do not use its
            own core.
        capacity: The largest number of cores, ``4·Σr²`` bytes each.
        adapter_name: The adapter with the basis.
        dtype: The dtype in which cores are kept; they multiply in float32.

    Raises:
        ConfigError: The model has no such adapter, the adapter has no basis, or the capacity is not positive.
    """

    def __init__(
        self, model: nn.Module, capacity: int, *, adapter_name: str = "default", dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.adapter_name, self.capacity, self.dtype = model, adapter_name, capacity, dtype
        self.layers = frozen_core_layers(model, adapter_name)
        if not self.layers:
            raise ConfigError(f"A bank needs a frozen-core adapter, but the model has none called {adapter_name!r}.")
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigError(f"A bank holds at least one core, but a capacity of {capacity!r} came.")
        configs: Any = model.peft_config
        if configs[adapter_name].trains_modules:
            raise ConfigError(
                f"A bank holds cores alone, so that other rows are the base model's, but the adapter {adapter_name!r} "
                "trains other modules too (modules_to_save or trainable_token_indices). Leave these out of it."
            )
        if dtype not in DTYPES:
            raise ConfigError(f"A bank keeps cores in float32, bfloat16 or float16, but {dtype} came.")
        for layer in self.layers.values():
            layer.require_basis(adapter_name)
        self._bases = held_bases(self.layers.values(), adapter_name)
        ranks: dict[torch.device, dict[str, int]] = {}
        for name, layer in sorted(self.layers.items()):  # the order of flattened cores
            R = layer.factors(adapter_name)[2]
            ranks.setdefault(R.device, {})[name] = len(R)
        self._values = {  # slots x Σr² on each device
            device: torch.zeros(capacity + 1, sum(r * r for r in here.values()), device=device, dtype=dtype)
            for device, here in ranks.items()
        }
        views = [by_layer(self._values[device], here) for device, here in ranks.items()]
        self._cores = dict(sorted((name, cores) for view in views for name, cores in view.items()))
        self._slot_of: dict[str, int] = {}
        self._free = list(range(capacity, 0, -1))
        self._batches: list[_Batch] = []  # one for each depth of nesting
        self._depth = 0
        self._names_lock, self._batch_lock = threading.Lock(), threading.RLock()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._slot_of))

    def put(self, name: str, source: str | Path | Mapping[str, Tensor]) -> None:
        """Store a core under a name; it replaces a core of that name.

        Args:
            source: See :func:`frozencore.swap_core`. The basis of R by layer name is not checked.

        Raises:
            ConfigError: The name is no text, the bank is full, or the adapter with the basis was merged or calibrated
                again.
            ArtifactError: Other layers, ranks, scales or bases. The bank is as it was.
        """
        if not isinstance(name, str):
            raise ConfigError(f"A core has a name (None is the base model in a batch), but {name!r:.60} came.")
        self._require_own_basis()
        configs: Any = self.model.peft_config
        flat = read_cores(source, self.layers, self.adapter_name, configs[self.adapter_name])
        require_finite_in(f"the core {name!r:.60}", flat, self.dtype)
        by_device = self._by_device(flat)
        with self._names_lock:
            slot = self._slot_of.get(name)
            if slot is None:
                if not self._free:
                    raise ConfigError(
                        f"The bank is full: it holds {len(self)} of {self.capacity} cores. Evict one first."
                    )
                slot = self._free.pop()
            with torch.no_grad():
                for device, part in by_device.items():
                    self._values[device][slot].copy_(part)
            self._slot_of[name] = slot

    def evict(self, name: str) -> None:
        """Remove a core.

        Raises:
            ConfigError: There is none of that name.
        """
        with self._names_lock:
            self._free.append(self._slot(name))
            del self._slot_of[name]

    def get(self, name: str) -> dict[str, Tensor]:
        """Copy R (r x r, float32) of every layer under a name to the CPU.

        Raises:
            ConfigError: There is none of that name.
        """
        with self._names_lock:
            slot = self._slot(name)
            return {layer: cores[slot].float().cpu().clone() for layer, cores in self._cores.items()}

    @contextmanager
    def rows(self, names: Sequence[str | None], *, num_beams: int = 1) -> Iterator[None]:
        """Send the rows of every batch inside through the named cores; None is the base model.

        Args:
            num_beams: The beams of ``generate``, which repeats each row so often (behind the encoder, if there is one).

        Raises:
            ConfigError: A name has no core, there are no names, or the adapter's basis was replaced.
            ValueError: An adapter is merged into the weights.
        """
        if not names:
            raise ConfigError("A batch has a name (or None) for each of its rows, but none came. Name each row.")
        self._require_own_basis()
        with self._batch_lock:
            with self._names_lock:
                slots = [0 if name is None else self._slot(name) for name in names]
                in_encoder = {id(module) for module in encoder_modules(self.model)} if num_beams > 1 else set()
                times = {name: 1 if id(one) in in_encoder else num_beams for name, one in self.layers.items()}
                if self._depth == len(self._batches):
                    self._batches.append(_Batch(self.layers, self.adapter_name))
                gathered = self._batches[self._depth].gather(self._cores, slots, times)
            with ExitStack() as undo, with_attributes(self, _depth=self._depth + 1):
                for name, R in gathered.items():
                    layer = self.layers[name]
                    undo.enter_context(rows_through(layer, layer.row_cores_of(self.adapter_name, R)))
                configs: Any = self.model.peft_config
                elsewhere = other_modules(self.model, self.layers) if len(configs) > 1 else []
                undo.enter_context(
                    base_rows(elsewhere, lambda one: len(slots) * (1 if id(one) in in_encoder else num_beams))
                )
                yield

    def _require_own_basis(self) -> None:
        way_out = "Make a new CoreBank and put the cores again."
        require_unmoved(self.layers.values(), self.adapter_name, self._bases, way_out)

    def _slot(self, name: str) -> int:
        if name not in self._slot_of:
            raise ConfigError(
                f"The bank holds no core {name!r} ({len(self)} of {self.capacity} are there). Put it first."
            )
        return self._slot_of[name]

    def _by_device(self, flat: Tensor) -> dict[torch.device, Tensor]:
        """The cores of one slot, split by device."""
        if len(self._values) == 1:
            return dict.fromkeys(self._values, flat)
        by_device: dict[torch.device, list[Tensor]] = {device: [] for device in self._values}
        sizes = [bank[0].numel() for bank in self._cores.values()]
        for bank, part in zip(self._cores.values(), flat.split(sizes), strict=True):
            by_device[bank.device].append(part)
        return {device: torch.cat(parts) for device, parts in by_device.items()}


class _Batch:
    """The gathered cores of a batch's rows in each layer, in buffers of the largest batch so far."""

    def __init__(self, layers: Mapping[str, FrozenCoreLayer], adapter_name: str) -> None:
        self.cores = {
            name: layer.factors(adapter_name)[2].detach().new_zeros(0, rank, rank)
            for name, layer in layers.items()
            for rank in [len(layer.core(adapter_name))]
        }

    def gather(self, cores: Mapping[str, Tensor], slots: Sequence[int], times: Mapping[str, int]) -> dict[str, Tensor]:
        """Copy the cores of those slots, each so often, from slots x r x r of each layer."""
        places: dict[tuple[torch.device, int], Tensor] = {}
        gathered = {}
        for name, buffer in self.cores.items():
            kind = (buffer.device, times[name])
            if kind not in places:
                places[kind] = torch.tensor(slots, device=kind[0]).repeat_interleave(kind[1])
            num_rows = len(places[kind])
            if num_rows > len(buffer):
                self.cores[name] = buffer.new_zeros(num_rows, *buffer.shape[1:]).mT
            gathered[name] = self.cores[name][:num_rows]
            gathered[name].copy_(cores[name].index_select(0, places[kind]))
        return gathered
