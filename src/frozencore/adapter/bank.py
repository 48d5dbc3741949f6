"""Cores that change between requests: one for each row of a batch, from a bank of thousands, or swapped in place.

    y += s·P(R[slot] Qᵀx)

Adapters on one basis differ only in r x r numbers per layer. In a mixed batch, by PEFT's ``adapter_names`` or from a
:class:`CoreBank`, each layer reads P and Q once and multiplies every row with its own core, also in training. Adapters
on different bases compute their own rows. PEFT passes the names to the tuner but not to the model, so they are left in
the layers while a batch runs.

In a bank the cores of a slot are contiguous (Σr² values), so that one copy adds a tenant. The cores of a batch's rows
are gathered once, when the batch begins. Slot 0 is zero and stands for the base model. Batches of all sizes use the
memory of the largest one so far. Until a larger one comes the rows' cores stay at their addresses, so CUDA graphs stay
valid. A swap replaces the core of a loaded adapter in place: nothing is allocated, and compiled code stays valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.folders import read_tensors
from frozencore.adapter.layer import FrozenCoreLinear, RowCores, frozen_core_layers, version_of
from frozencore.adapter.saved import state
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import read_config
from frozencore.quiet import with_attributes

BASE_ROW = "__base__"  # PEFT's name for "no adapter"


@contextmanager
def adapter_of_each_row(model: nn.Module, names: Sequence[str], *, num_beams: int = 1) -> Iterator[None]:
    """Use the named adapters for the rows of every batch inside.

    Args:
        names: One adapter name, or ``"__base__"``, per row.
        num_beams: The number of copies of each row, behind the encoder if there is one.
    """
    layers = [m for m in model.modules() if isinstance(m, FrozenCoreLinear | AuxiliaryTrainingWrapper)]
    frozen = [layer for layer in layers if isinstance(layer, FrozenCoreLinear)]
    known = {name for layer in frozen for name in layer.frozencore_R}
    unknown = sorted(set(names) - known - {BASE_ROW})
    if unknown:
        raise ValueError(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. "
            f"The model has {', '.join(sorted(known))}, and {BASE_ROW} for the base model."
        )
    wanted = [name for name in dict.fromkeys(names) if name != BASE_ROW]
    kinds = [
        {
            (id(layer.frozencore_P[name]), id(layer.frozencore_Q[name]), layer.frozencore_scale[name])
            for name in wanted
            if name in layer.frozencore_R
        }
        for layer in frozen
    ]
    together = all(len(kinds_here) <= 1 for kinds_here in kinds)
    if model.training and (not together or len(layers) > len(frozen)):
        raise ValueError(
            "Cannot pass `adapter_names` in training mode unless all share a basis and train nothing but cores. "
            "Call model.eval() first, or load cores of one basis."
        )
    of_each_beam = [name for name in names for _ in range(num_beams)]
    in_encoder = {id(module) for module in encoder_modules(model)}
    with ExitStack() as undo:
        for layer in layers:
            names_here = list(names) if id(layer) in in_encoder else of_each_beam
            if isinstance(layer, FrozenCoreLinear):
                rows = _row_cores(layer, wanted, names_here) if together else names_here
                undo.enter_context(rows_through(layer, rows))
            else:  # PEFT's
                given = {"adapter_names": names_here}
                hook = layer.register_forward_pre_hook(
                    lambda _, args, kwargs, given=given: (args, kwargs | given), with_kwargs=True
                )
                undo.callback(hook.remove)
        yield


@contextmanager
def rows_through(layer: FrozenCoreLinear, rows: RowCores | list[str]) -> Iterator[None]:
    """Use the rows' own cores in a layer, in place of its active adapters, for every batch inside."""
    if layer.merged:  # each row would get the merged update
        raise ValueError(
            "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
        )
    with with_attributes(layer, row_cores=rows):  # an outer batch goes on with its own rows
        yield


def other_modules(model: nn.Module, own: Container[str]) -> list[FrozenCoreLinear | AuxiliaryTrainingWrapper]:
    """What other adapters change in a model: layers besides those named ``own``, and trained copies of modules."""
    return [
        module
        for module in model.modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        or (isinstance(module, FrozenCoreLinear) and module.name not in own)
    ]


@contextmanager
def base_rows(
    others: Iterable[FrozenCoreLinear | AuxiliaryTrainingWrapper], num_rows: Callable[[nn.Module], int]
) -> Iterator[None]:
    """Use the base model for every row in the modules of other adapters, whichever is active."""
    with ExitStack() as undo:
        for module in others:
            if isinstance(module, FrozenCoreLinear):
                undo.enter_context(rows_through(module, RowCores(None, torch.empty(num_rows(module), 0, 0))))
            else:
                undo.enter_context(with_attributes(module, _disable_adapters=True))
        yield


def _row_cores(layer: FrozenCoreLinear, wanted: Sequence[str], names: Sequence[str]) -> RowCores:
    """The core of each row; zeros for rows without an adapter in this layer."""
    here = [name for name in wanted if name in layer.frozencore_R]
    if not here:
        return RowCores(None, torch.empty(len(names), 0, 0))
    cores = [layer.trained_factors(name)[2] for name in here]
    slot = {name: i for i, name in enumerate(here, start=1)}
    slots = torch.tensor([slot.get(name, 0) for name in names], device=cores[0].device)
    transposed = torch.stack([torch.zeros_like(cores[0]), *(R.mT for R in cores)]).index_select(0, slots)
    return layer.row_cores_of(here[0], transposed.mT)


def encoder_modules(model: Any) -> Iterator[nn.Module]:
    """The modules of an encoder that runs once, before beams repeat the rows."""
    base = getattr(model, "model", model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        yield from base.get_encoder().modules()


HeldBases = tuple[tuple[Tensor, int, Tensor, int], ...]
"""P and Q of each layer and the versions of their values."""


@dataclass(frozen=True)
class ReadyCore:
    """Cores that were checked against a loaded adapter; :meth:`swap_in` copies them.

    Attributes:
        bases: P and Q of each layer, and their versions at the time of the check.
        cores: One r x r tensor a layer, on the layer's device and in its dtype.
    """

    adapter_name: str
    layers: tuple[FrozenCoreLinear, ...]
    bases: HeldBases
    cores: tuple[Tensor, ...]

    def swap_in(self) -> None:
        """Copy the cores into the loaded adapter.

        Raises:
            ConfigError: The adapter was merged into the weights, or calibrated or moved since the check.
        """
        _require_unmerged(self.layers)
        _require_unmoved(self.layers, self.adapter_name, self.bases, "Call prepare_swap again.")
        with torch.no_grad():
            torch._foreach_copy_([layer.core(self.adapter_name) for layer in self.layers], list(self.cores))
        for layer in self.layers:
            layer.awaits_core.discard(self.adapter_name)


def swap_core(model: nn.Module, source: str | Path | Mapping[str, Tensor], *, adapter_name: str = "default") -> None:
    """Copy the cores of a saved adapter into a loaded adapter with the same bases.

    Args:
        source: A folder that ``save_pretrained`` wrote, the state dict of ``peft.get_peft_model_state_dict``, or R
            (r x r) by layer name. A state dict has no scale, so the loaded adapter's is assumed. R by layer name do
            not say what basis they are of: only their layers and ranks are checked.

    Raises:
        ConfigError: The model has no such adapter, or it is merged into the weights.
        ArtifactError: Other layers, ranks, scales or bases, or trained modules besides cores. Nothing is copied then.
    """
    prepare_swap(model, source, adapter_name=adapter_name).swap_in()


def prepare_swap(
    model: nn.Module, source: str | Path | Mapping[str, Tensor], *, adapter_name: str = "default"
) -> ReadyCore:
    """Read and check the cores of a saved adapter once, to swap them in many times; see :func:`swap_core`."""
    layers = frozen_core_layers(model, adapter_name)
    if not layers:
        raise ConfigError(f"swap_core needs a frozen-core adapter, but the model has none called {adapter_name!r}.")
    own = {name: layer.core(adapter_name) for name, layer in layers.items()}
    flat = _read_cores(model, source, layers, adapter_name)
    for dtype in {R.dtype for R in own.values()}:
        state.require_finite_in("the core", flat, dtype)
    new = state.split_cores(str(source), flat, {name: len(R) for name, R in own.items()})
    cores = tuple(new[name].detach().to(R.device, R.dtype, copy=True) for name, R in own.items())
    here = tuple(layers.values())
    return ReadyCore(adapter_name, here, _held_bases(here, adapter_name), cores)


def _held_bases(layers: Iterable[FrozenCoreLinear], adapter_name: str) -> HeldBases:
    factors = (layer.factors(adapter_name) for layer in layers)
    return tuple((P, version_of(P), Q, version_of(Q)) for P, Q, _ in factors)


def _require_unmoved(layers: Iterable[FrozenCoreLinear], adapter_name: str, held: HeldBases, way_out: str) -> None:
    """Refuse cores that were made for bases which an adapter no longer has."""
    for layer, old in zip(layers, held, strict=True):
        P, Q, _ = layer.factors(adapter_name)
        if P is not old[0] or Q is not old[2] or (version_of(P), version_of(Q)) != (old[1], old[3]):
            raise ConfigError(
                f"A core works on its own basis only, but the basis of layer {layer.name!r} of the adapter "
                f"{adapter_name!r} was set or moved since. {way_out}"
            )


def _read_cores(
    model: Any, source: str | Path | Mapping[str, Tensor], layers: Mapping[str, FrozenCoreLinear], adapter_name: str
) -> Tensor:
    """Read all cores for a loaded adapter with these layers: Σr² values in the order of the layers' names."""
    _require_unmerged(layers.values())
    config = model.peft_config[adapter_name]
    if isinstance(source, Mapping):
        origin, tensors = "the state dict", source
    elif isinstance(source, str | Path):
        origin, tensors = str(source), _read_folder(Path(source), layers, adapter_name, config)
    else:
        raise ConfigError(
            f"Cores are a folder that save_pretrained wrote, a state dict, or R by layer name, but a "
            f"{type(source).__name__} came."
        )
    flat = _flat_cores(origin, tensors, layers, adapter_name, config.basis_id)
    state.require_size(origin, flat, sum(len(layer.core(adapter_name)) ** 2 for layer in layers.values()))
    return flat


def _read_folder(
    folder: Path, layers: Mapping[str, FrozenCoreLinear], adapter_name: str, config: FrozenCoreConfig
) -> Mapping[str, Tensor]:
    """Read the tensors of a folder, without the basis if it names the loaded adapter's; refuse other scales."""
    named = read_config(folder).get("basis_id")
    if named is not None and named == config.basis_id:
        values, tensors = state.read_folder(folder)
        theirs_config, held = FrozenCoreConfig.of_file(folder, values), set(layers)
    else:
        theirs_config, tensors = read_tensors(folder)
        held = layers.keys() & {key.removeprefix(state.BASE).partition(f".{state.PREFIX}")[0] for key in tensors}
    for name in held:
        mine, theirs = layers[name].frozencore_scale[adapter_name], theirs_config.scale_of(name)
        if mine != theirs:
            raise ArtifactError(
                f"The core of layer {name!r} was trained at scale {theirs:g}, but the adapter {adapter_name!r} has "
                f"{mine:g}. Load it with model.load_adapter instead."
            )
    return tensors


def _flat_cores(
    origin: str,
    tensors: Mapping[str, Tensor],
    layers: Mapping[str, FrozenCoreLinear],
    adapter_name: str,
    basis_id: str | None,
) -> Tensor:
    """All cores as one vector: from R by layer name, from cores alone, or from P, Q and R of the same bases."""
    if tensors.keys() & layers.keys():  # R by layer name
        _require_same_layers(tensors, layers)
        for name, R in tensors.items():
            r = len(layers[name].core(adapter_name))
            if R.shape != (r, r) or not torch.isfinite(R.float()).all():
                raise ArtifactError(
                    f"The core of layer {name!r} is {r} x {r} and finite here, but one of shape {tuple(R.shape)} came, "
                    "or one with NaN or Inf."
                )
        return state.flatten_cores(tensors)
    if others := [key for key in tensors if f".{state.PREFIX}" not in key and key not in (state.FLAT, state.MARK)]:
        raise ArtifactError(
            f"Only cores can be swapped, but {origin} holds {others[0]!r} ({len(others)} in all). Load it with "
            "model.load_adapter or peft.set_peft_model_state_dict instead."
        )
    if state.FLAT in tensors:
        state.require_finite(origin, tensors)
        state.require_marked(origin, tensors, basis_id)
        return tensors[state.FLAT]
    factors = state.layer_factors(origin, tensors)
    _require_same_layers(factors, layers)
    for name, layer in layers.items():
        for mine, theirs in zip(layer.factors(adapter_name), (factors[name].P, factors[name].Q), strict=False):
            if mine.shape != theirs.shape or not torch.equal(mine, theirs.to(mine.device, mine.dtype)):
                raise ArtifactError(
                    f"A core works on its own basis only, but layer {name!r} of the adapter {adapter_name!r} has "
                    "another one. Load the adapter with model.load_adapter instead."
                )
    return state.flatten_cores({name: factors[name].R for name in layers})


def _require_unmerged(layers: Iterable[FrozenCoreLinear]) -> None:
    for layer in layers:
        if layer.merged:
            raise ConfigError(
                f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() before swapping cores."
            )


def _require_same_layers(came: Mapping[str, object], layers: Mapping[str, FrozenCoreLinear]) -> None:
    if came.keys() != layers.keys():
        odd = sorted(came.keys() ^ layers.keys())
        raise ArtifactError(
            f"Cores can be swapped between adapters of the same layers, but {odd[0]!r} ({len(odd)} in all) has a core "
            "on one side only. Load the adapter with model.load_adapter instead."
        )


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
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"A bank keeps cores in float32, bfloat16 or float16, but {dtype} came.")
        for layer in self.layers.values():
            layer.require_basis(adapter_name)
        self._bases = _held_bases(self.layers.values(), adapter_name)
        ranks: dict[torch.device, dict[str, int]] = {}
        for name, layer in sorted(self.layers.items()):  # the order of flattened cores
            R = layer.core(adapter_name)
            ranks.setdefault(R.device, {})[name] = len(R)
        self._values = {  # slots x Σr² on each device
            device: torch.zeros(capacity + 1, sum(r * r for r in here.values()), device=device, dtype=dtype)
            for device, here in ranks.items()
        }
        views = [state.by_layer(self._values[device], here) for device, here in ranks.items()]
        self._cores = dict(sorted((name, cores) for view in views for name, cores in view.items()))
        self._slot_of: dict[str, int] = {}
        self._free = list(range(capacity, 0, -1))
        self._buffers: list[dict[str, Tensor]] = []  # the largest batch so far, for each depth of nesting
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
        flat = _read_cores(self.model, source, self.layers, self.adapter_name)
        state.require_finite_in(f"the core {name!r:.60}", flat, self.dtype)
        with self._names_lock:
            slot = self._slot_of.get(name)
            if slot is None:
                if not self._free:
                    raise ConfigError(
                        f"The bank is full: it holds {len(self)} of {self.capacity} cores. Evict one first."
                    )
                slot = self._free.pop()
            with torch.no_grad():
                if len(self._values) == 1:
                    next(iter(self._values.values()))[slot].copy_(flat)
                else:
                    ranks = {layer: cores.shape[-1] for layer, cores in self._cores.items()}
                    for layer, R in state.by_layer(flat, ranks).items():
                        self._cores[layer][slot].copy_(R)
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
                gathered = self._gather(slots, times)
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

    def _gather(self, slots: Sequence[int], times: Mapping[str, int]) -> dict[str, Tensor]:
        """Copy the cores of those slots, each so often, into the buffers of this depth of nesting."""
        if self._depth == len(self._buffers):
            cores = {name: layer.core(self.adapter_name).detach() for name, layer in self.layers.items()}
            self._buffers.append({name: R.new_zeros(0, *R.shape) for name, R in cores.items()})
        buffers, gathered = self._buffers[self._depth], {}
        places: dict[tuple[torch.device, int], Tensor] = {}
        for name, buffer in buffers.items():
            kind = (buffer.device, times[name])
            if kind not in places:
                places[kind] = torch.tensor(slots, device=kind[0]).repeat_interleave(kind[1])
            num_rows = len(places[kind])
            if num_rows > len(buffer):
                buffers[name] = buffer.new_zeros(num_rows, *buffer.shape[1:]).mT
            gathered[name] = buffers[name][:num_rows]
            gathered[name].copy_(self._cores[name].index_select(0, places[kind]))
        return gathered

    def _require_own_basis(self) -> None:
        way_out = "Make a new CoreBank and put the cores again."
        _require_unmoved(self.layers.values(), self.adapter_name, self._bases, way_out)

    def _slot(self, name: str) -> int:
        if name not in self._slot_of:
            raise ConfigError(
                f"The bank holds no core {name!r} ({len(self)} of {self.capacity} are there). Put it first."
            )
        return self._slot_of[name]
