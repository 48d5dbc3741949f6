"""Banks: thousands of cores on one adapter's basis; each row of a batch uses one of them.

The cores of a slot are contiguous (Σr² values), so that one copy adds a tenant. The cores of a batch's rows are
gathered once, when the batch begins. Batches of all sizes use the memory of the largest one so far. The rows' cores
keep their addresses until a larger batch runs, so CUDA graphs stay valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.basis import require_set
from frozencore.adapter.core import Core, by_layer
from frozencore.adapter.loaded_adapter import LoadedAdapter
from frozencore.adapter.per_row import cores_of_rows, lock_of, other_modules, repetitions
from frozencore.adapter.swap import CoreSource, read_core, require_unmerged
from frozencore.attributes import with_attributes
from frozencore.errors import ArtifactError, ConfigError
from frozencore.maths.linalg import all_finite
from frozencore.maths.quantise import BITS, levels, pack, unpack


class CoreStack:
    """Slots of cores on the basis of one loaded adapter. The core of that adapter is not used.

    Attributes:
        basis_id: The id of the basis.
        ranks: r of each layer, in the order of a core's values.
        blocks: slots x Σr² on each device.
        cores: Views of them by layer, slots x r x r.

    Raises:
        ConfigError: There is no such adapter, it trains other modules too, or it is merged.
        CalibrationError: It has no basis.
    """

    def __init__(
        self, model: nn.Module, num_slots: int, *, adapter_name: str = "default", dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.adapter = model, LoadedAdapter.of(model, adapter_name)
        self.adapter.config.require_core_alone(
            f"the adapter {adapter_name!r}", "Rows and tenants share all but their cores"
        )
        require_unmerged(self.adapter.layers.values())
        require_set(self.adapter.bases)
        self.ranks, self.basis_id = self.adapter.ranks, self.adapter.basis_id
        on_device: dict[torch.device, dict[str, int]] = {}
        for name, R in self.adapter.cores.items():
            on_device.setdefault(R.device, {})[name] = len(R)
        with torch.inference_mode(False):  # tensors made inside of it could not be changed outside
            self.blocks = {
                device: torch.zeros(num_slots, sum(r * r for r in here.values()), device=device, dtype=dtype)
                for device, here in on_device.items()
            }
            views = [by_layer(self.blocks[device], here) for device, here in on_device.items()]
        self.cores = {name: core for by_name in views for name, core in by_name.items()}

    @torch.no_grad()
    def fill(self, slot: int, core: Core) -> None:
        """Copy a core on the basis into a slot."""
        if len(self.blocks) == 1:
            next(iter(self.blocks.values()))[slot].copy_(core.values)
        else:
            for layer, R in core.by_layer(self.ranks).items():
                self.cores[layer][slot].copy_(R)

    def of_slots(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Use the core of its slot for each row of every batch inside."""
        places = {device: torch.tensor(slots, device=device) for device in self.blocks}
        return self.with_cores({name: core[places[core.device]] for name, core in self.cores.items()})

    def with_cores(self, cores: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Use a core (rows x r x r) of each layer for each row of every batch inside."""
        configs: Any = self.model.peft_config
        others = other_modules(self.model, self.adapter.layers) if len(configs) > 1 else []
        return cores_of_rows(self.model, self.adapter.layers, self.adapter.name, cores, others)


class PackedSlots:
    """Slots of cores in 8, 4 or 2 bits: whole bytes of codes and a scale for each layer."""

    def __init__(self, num_slots: int, layers: Mapping[str, Tensor], bits: int) -> None:
        """
        Args:
            layers: R of each layer; its shape and device are used, its values are not.
        """
        self.bits = bits
        self.ranks = {name: len(R) for name, R in layers.items()}
        sizes = {name: -(-R.numel() * bits // 8) for name, R in layers.items()}
        with torch.inference_mode(False):  # tensors made inside of it could not be changed outside
            self.codes = {
                name: torch.zeros(num_slots, sizes[name], dtype=torch.uint8, device=R.device)
                for name, R in layers.items()
            }
            self.scales = {
                name: torch.zeros(num_slots, dtype=torch.float16, device=R.device) for name, R in layers.items()
            }

    def fill(self, slot: int, core: Core) -> None:
        """Copy a core into a slot; values of other bits are rounded."""
        few = core.in_bits(self.bits, self.ranks).packed
        assert few is not None
        device = next(iter(self.scales.values())).device
        packed, scales = few.codes.to(device), few.scales.to(device)  # two copies to the device, then many on it
        if all(r * r * self.bits % 8 == 0 for r in self.ranks.values()):
            codes = list(packed.split([codes.shape[1] for codes in self.codes.values()]))
        else:  # a layer of the file begins within a byte
            layers = by_layer(unpack(packed, self.bits, len(core.values)), self.ranks)
            codes = [pack(codes.flatten(), self.bits) for codes in layers.values()]
        torch._foreach_copy_([codes[slot] for codes in self.codes.values()], codes)
        torch._foreach_copy_([places[slot] for places in self.scales.values()], list(scales.unbind()))

    def values(self, name: str, slots: Tensor) -> Tensor:
        """R (slots x r x r) of a layer, float32."""
        r = self.ranks[name]
        codes = unpack(self.codes[name].index_select(0, slots), self.bits, r * r).unflatten(-1, (r, r))
        return levels(codes, self.scales[name].index_select(0, slots)[:, None, None], self.bits)


class CoreBank(CoreStack):
    """Cores by name on the basis of one loaded adapter, up to a fixed number.

    A running batch keeps the cores that it started with, even if they are replaced or evicted. ``put``, ``evict`` and
    look-ups may be called from any thread. Only one thread at a time runs a mixed batch on a model, from whichever bank
    or ``adapter_names``; the others wait, and another asyncio task of the thread is refused. A plain pass in another
    thread or task is refused meanwhile: run it in ``rows([None, ...])``, for which a thread waits. A batch inside
    another one has other rows; the outer batch then goes on with its rows.

    Args:
        model: A model with a frozen-core adapter. Its P, Q and scale serve every core; its core is not used by rows
            of the bank.
        capacity: The largest number of cores, ``4·Σr²`` bytes each.
        adapter_name: The adapter with the basis.
        dtype: The dtype in which cores are stored; they multiply in float32.
        bits: 8, 4 or 2 store codes of so many bits in place of ``dtype``, and only a batch's rows become float32.

    Raises:
        ConfigError: The model has no such adapter, it is merged, or the capacity, dtype or bits are not allowed.
        CalibrationError: The adapter has no basis.
    """

    def __init__(
        self,
        model: nn.Module,
        capacity: int,
        *,
        adapter_name: str = "default",
        dtype: torch.dtype = torch.float32,
        bits: int = 32,
    ) -> None:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        if dtype not in dtypes or (bits != 32 and (bits not in BITS or dtype != torch.float32)):
            raise ConfigError(
                "A bank keeps cores in float32, bfloat16 or float16, or in 8, 4 or 2 bits of float32, but "
                f"bits={bits} and {dtype} were given."
            )
        if capacity < 1:
            raise ConfigError(f"A bank holds one core at least, but capacity={capacity} was given.")
        num_slots = capacity + 1  # slot 0 is the base model
        super().__init__(model, num_slots if bits == 32 else 0, adapter_name=adapter_name, dtype=dtype)
        cores = self.adapter.cores
        self.packed = None if bits == 32 else PackedSlots(num_slots, cores, bits)
        self.capacity, self.dtype = capacity, dtype
        self._slot_of: dict[str, int] = {}
        self._free = list(range(capacity, 0, -1))
        self._buffers: list[dict[str, Tensor]] = []  # the largest batch so far, for each depth of nesting
        self._depth = 0
        self._names_lock = threading.Lock()

    def fill(self, slot: int, core: Core) -> None:
        """Copy a core on the basis into a slot."""
        if self.packed is None:
            super().fill(slot, core)
        else:
            self.packed.fill(slot, core)

    def _values(self, name: str, slots: Tensor) -> Tensor:
        """R (slots x r x r) of a layer."""
        packed = self.packed
        return self.cores[name].index_select(0, slots) if packed is None else packed.values(name, slots)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: str) -> bool:
        return name in self._slot_of

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._slot_of))

    def put(self, name: str, source: CoreSource) -> None:
        """Store a core under a name; it replaces a core of that name.

        Args:
            source: See :func:`frozencore.swap_core`.

        Raises:
            ConfigError: The name is None, the bank is full, the adapter with the basis was merged, or a value is too
                large for the bits of the bank.
            ArtifactError: Another basis, or the adapter of the bank was given another one; trained modules besides the
                core; or a value is too large for the dtype of the bank. The bank is as it was.
        """
        if name is None:
            raise ConfigError("A core has a name, but None was given, which is the base model in a batch.")
        require_unmerged(self.adapter.layers.values())
        self.adapter.require_basis(self.basis_id)
        core = read_core(source, self.basis_id)
        core.require_size(sum(r * r for r in self.ranks.values()))
        if not all_finite(core.values.to(self.dtype)):
            raise ArtifactError(f"The core {name!r:.60} has values beyond the range of {self.dtype}.")
        with self._names_lock:
            slot = self._slot_of.get(name)
            if slot is None:
                if not self._free:
                    raise ConfigError(
                        f"The bank is full: it holds {len(self)} of {self.capacity} cores. Evict one first."
                    )
                slot = self._free[-1]
            self.fill(slot, core)
            if name not in self._slot_of:
                self._slot_of[name] = self._free.pop()

    def evict(self, name: str) -> None:
        """Remove a core.

        Raises:
            ConfigError: There is none of that name.
        """
        with self._names_lock:
            self._free.append(self._slot(name))
            del self._slot_of[name]

    def get(self, name: str) -> Core:
        """Copy the core under a name to the CPU.

        Raises:
            ConfigError: There is none of that name.
        """
        with self._names_lock:
            slot = torch.tensor([self._slot(name)])
            layers = {name: self._values(name, slot.to(R.device)) for name, R in self.cores.items()}
            return Core.of(self.basis_id, {name: R[0].float().cpu() for name, R in layers.items()})

    @contextmanager
    def rows(self, names: Sequence[str | None], *, num_beams: int = 1) -> Iterator[None]:
        """Send the rows of every batch inside through the named cores; None is the base model.

        Args:
            num_beams: The beams of ``generate``, which repeats each row so often (behind the encoder, if there is one).

        Raises:
            ConfigError: A name has no core, or the model was moved to another device.
            ArtifactError: The adapter's basis was replaced.
            ValueError: An adapter is merged into the weights.
        """
        self.adapter.require_basis(self.basis_id)
        device = next(iter(self.adapter.layers.values())).core(self.adapter.name).device
        if device not in self.blocks:
            raise ConfigError(
                f"A bank's cores stay where its model was when the bank was made, but the model is on {device} now. "
                "Move the model first, then make the bank."
            )
        with lock_of(self.model):
            with self._names_lock:
                slots = [0 if name is None else self._slot(name) for name in names]
                gathered = self._gather(slots, repetitions(self.model, num_beams))
            with with_attributes(self, _depth=self._depth + 1), self.with_cores(gathered):
                yield

    @torch.inference_mode(False)  # tensors made inside of it could not be changed outside
    @torch.no_grad()
    def _gather(self, slots: Sequence[int], times: Callable[[nn.Module], int]) -> dict[str, Tensor]:
        """Copy the cores of these slots, repeated as a layer sees the rows, into the buffers of this depth."""
        if self._depth == len(self._buffers):
            cores = {name: R.detach() for name, R in self.adapter.cores.items()}
            self._buffers.append({name: R.new_zeros(0, *R.shape) for name, R in cores.items()})
        buffers, gathered = self._buffers[self._depth], {}
        places: dict[tuple[torch.device, int], Tensor] = {}
        for name, buffer in buffers.items():
            kind = (buffer.device, times(self.adapter.layers[name]))
            if kind not in places:
                places[kind] = torch.tensor(slots, dtype=torch.long, device=kind[0]).repeat_interleave(kind[1])
            num_rows = len(places[kind])
            if num_rows > len(buffer):
                buffers[name] = buffer.new_zeros(num_rows, *buffer.shape[1:]).mT
            gathered[name] = buffers[name][:num_rows]
            gathered[name].copy_(self._values(name, places[kind]))
        return gathered

    def _slot(self, name: str) -> int:
        if name not in self._slot_of:
            raise ConfigError(
                f"The bank holds no core {name!r} ({len(self)} of {self.capacity} are there). Put it first."
            )
        return self._slot_of[name]
