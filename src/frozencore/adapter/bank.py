"""A bank of cores: thousands of tenants of one basis in one loaded model, each row of a batch through its own core.

    y += s·P(R[slot] Qᵀ x)

The cores of a layer are one tensor, slots x r x r; slot 0 is zero and stands for the base model. All layers' cores of a
slot lie side by side (Σr² values), so that a tenant enters with one copy. Nothing is allocated after the bank is
made: compiled code and CUDA graphs stay valid, because a row's slot is a value in a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLayer, RowCores, frozen_core_layers
from frozencore.adapter.mixed_batch import encoder_modules, rows_through
from frozencore.adapter.swap import cores_of
from frozencore.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CoreBank:
    """Cores by name on the basis of one loaded adapter, up to a fixed number of them.

    A batch that runs keeps the cores that it began with: a core that is replaced or evicted meanwhile gives its slot
    back when the batch ends. ``put``, ``evict`` and look-ups may be called from any thread; batches take turns.

    Args:
        model: A model with a frozen-core adapter, whose P, Q and scale are those of every core; its own core is not
            used by rows of the bank.
        capacity: Cores that it holds at most: ``4·Σr²`` bytes each.
        adapter_name: The adapter with the basis.
        dtype: In which cores are kept; they multiply in float32.

    Raises:
        ConfigError: The model has no such adapter, it has no basis, or the capacity is not positive.
    """

    def __init__(
        self, model: nn.Module, capacity: int, *, adapter_name: str = "default", dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.adapter_name, self.capacity = model, adapter_name, capacity
        self.layers = frozen_core_layers(model, adapter_name)
        if not self.layers:
            raise ConfigError(f"A bank needs a frozen-core adapter, but the model has none called {adapter_name!r}.")
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigError(f"A bank holds at least one core, but a capacity of {capacity!r} came.")
        if dtype not in DTYPES:
            raise ConfigError(f"A bank keeps cores in float32, bfloat16 or float16, but {dtype} came.")
        for layer in self.layers.values():
            layer.require_basis(adapter_name)
        self._values, self._cores = _allocate(self.layers, adapter_name, capacity + 1, dtype)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(capacity, 0, -1))
        self._users = [0] * (capacity + 1)  # batches that run with a slot
        self._retired: set[int] = set()  # slots without a name that a batch still runs with
        self._rows: dict[tuple[int, int], dict[str, RowCores]] = {}
        self._names_lock, self._batch_lock = threading.Lock(), threading.RLock()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._slot_of))

    def put(self, name: str, source: str | Path | Mapping[str, Tensor]) -> None:
        """Hold a core under a name, in place of the one that had it.

        Args:
            source: A folder that ``save_pretrained`` wrote, a state dict of PEFT's, or R (r x r) by layer name.

        Raises:
            ConfigError: The bank is full, or the adapter with the basis was merged or calibrated again.
            ArtifactError: Other layers, ranks, scales or bases. The bank is as it was.
        """
        by_device = self._flat(cores_of(source, self.model, self.adapter_name))
        with self._names_lock:
            slot = self._slot_to_write(name)
            with torch.no_grad():
                for device, flat in by_device.items():
                    self._values[device][slot].copy_(flat)
            old = self._slot_of.get(name)
            self._slot_of[name] = slot
            if old is not None and old != slot:
                self._give_back(old)

    def evict(self, name: str) -> None:
        """Forget a core.

        Raises:
            ConfigError: There is none of that name.
        """
        with self._names_lock:
            self._give_back(self._slot(name))
            del self._slot_of[name]

    def get(self, name: str) -> dict[str, Tensor]:
        """R (r x r, float32) of every layer under a name: copies on the CPU.

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
            num_beams: Of ``generate``, which repeats rows that often behind the encoder, if there is one, else from
                the start.

        Raises:
            ConfigError: There is no core of a name.
            ValueError: An adapter is merged into the weights.
        """
        with self._batch_lock:
            with self._names_lock:
                slots = [0 if name is None else self._slot(name) for name in names]
                for slot in slots:
                    self._users[slot] += 1
            try:
                with ExitStack() as undo:
                    for name, rows in self._rows_of(slots, num_beams).items():
                        undo.enter_context(rows_through(self.layers[name], rows))
                    yield
            finally:
                with self._names_lock:
                    for slot in slots:
                        self._users[slot] -= 1
                        if not self._users[slot] and slot in self._retired:
                            self._retired.discard(slot)
                            self._free.append(slot)

    def _slot(self, name: str) -> int:
        if name not in self._slot_of:
            raise ConfigError(
                f"The bank holds no core {name!r} ({len(self)} of {self.capacity} are there). Put it first."
            )
        return self._slot_of[name]

    def _slot_to_write(self, name: str) -> int:
        """A free slot; the one in use only where there is none other and no batch runs with it."""
        if self._free:
            return self._free.pop()
        slot = self._slot_of.get(name)
        if slot is not None and not self._users[slot]:
            return slot
        raise ConfigError(f"The bank is full: it holds {len(self)} of {self.capacity} cores. Evict one first.")

    def _give_back(self, slot: int) -> None:
        if self._users[slot]:
            self._retired.add(slot)
        else:
            self._free.append(slot)

    def _flat(self, cores: Mapping[str, Tensor]) -> dict[torch.device, Tensor]:
        """Cores side by side, as a slot holds them."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for name, bank in self._cores.items():
            by_device.setdefault(bank.device, []).append(cores[name].reshape(-1))
        return {device: torch.cat(parts) for device, parts in by_device.items()}

    def _rows_of(self, slots: Sequence[int], num_beams: int) -> dict[str, RowCores]:
        """What each layer looks at: the same objects for every batch of a size, with other slots in them."""
        found = self._rows.get((len(slots), num_beams))
        if found is None:
            in_encoder = {id(module) for module in encoder_modules(self.model)} if num_beams > 1 else set()
            places: dict[tuple[torch.device, int], Tensor] = {}
            found = {}
            for name, layer in self.layers.items():
                cores, times = self._cores[name], 1 if id(layer) in in_encoder else num_beams
                own = torch.zeros(len(slots) * times, dtype=torch.int64, device=cores.device)
                rows = places.setdefault((cores.device, times), own)
                found[name] = RowCores(self.adapter_name, cores, rows)
            self._rows[len(slots), num_beams] = found
        came = torch.tensor(slots)
        for rows in {id(rows.slots): rows.slots for rows in found.values()}.values():
            rows.copy_(came.repeat_interleave(len(rows) // max(1, len(slots))))
        return found


def _allocate(
    layers: Mapping[str, FrozenCoreLayer], adapter_name: str, num_slots: int, dtype: torch.dtype
) -> tuple[dict[torch.device, Tensor], dict[str, Tensor]]:
    """Slots x Σr² values on each device, and each layer's slots x r x r of them."""
    ranks: dict[torch.device, list[tuple[str, int]]] = {}
    for name, layer in layers.items():
        R = layer.factors(adapter_name)[2]
        ranks.setdefault(R.device, []).append((name, len(R)))
    values: dict[torch.device, Tensor] = {}
    cores: dict[str, Tensor] = {}
    for device, here in ranks.items():
        values[device] = torch.zeros(num_slots, sum(r * r for _, r in here), device=device, dtype=dtype)
        parts = values[device].split([r * r for _, r in here], dim=1)
        cores |= {name: part.unflatten(1, (r, r)) for (name, r), part in zip(here, parts, strict=True)}
    return values, cores
