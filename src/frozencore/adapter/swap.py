"""Swap the core of a loaded adapter in place: nothing is allocated, and compiled code stays valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from frozencore.adapter.basis import require_same_id
from frozencore.adapter.core import Core
from frozencore.adapter.folders import read_tensors
from frozencore.adapter.layer import BasisState, FrozenCoreLinear
from frozencore.adapter.loaded_adapter import LoadedAdapter
from frozencore.adapter.state_dict import module_tensors
from frozencore.errors import ArtifactError, ConfigError

CoreSource = str | Path | Mapping[str, Tensor] | Core
"""A core: a folder that ``save_pretrained`` wrote, the state dict of ``peft.get_peft_model_state_dict``, or itself."""


@dataclass(frozen=True)
class ReadyCore:
    """A core on the device of a loaded adapter; :meth:`swap_in` copies it.

    Attributes:
        cores: One r x r tensor a layer, in the dtype of the layer.
    """

    basis_id: str
    adapter: LoadedAdapter
    cores: Mapping[str, Tensor]

    def swap_in(self) -> None:
        """Copy the core into the loaded adapter.

        Raises:
            ConfigError: The adapter was merged into the weights.
            ArtifactError: It was given another basis, or was deleted.
            ModelError: A core of it was pruned, parametrised or offloaded.
        """
        adapter = self.adapter
        require_unmerged(adapter.layers.values())
        adapter.require_basis(self.basis_id)
        with torch.no_grad():
            torch._foreach_copy_(list(adapter.cores.values()), list(self.cores.values()))
        for layer in adapter.layers.values():
            layer.frozencore_state[adapter.name] = BasisState.READY


def swap_core(model: nn.Module, source: CoreSource, *, adapter_name: str = "default") -> None:
    """Copy a core into a loaded adapter with the same basis.

    Args:
        source: A folder that ``save_pretrained`` wrote, the state dict of ``peft.get_peft_model_state_dict``, or a
            core.

    Raises:
        ConfigError: The model has no such adapter, or it is merged into the weights.
        ArtifactError: Another basis, or trained modules besides the core. Nothing is copied then.
        ModelError: A core of it is pruned, parametrised or offloaded.
    """
    prepare_swap(model, source, adapter_name=adapter_name).swap_in()


def prepare_swap(model: nn.Module, source: CoreSource, *, adapter_name: str = "default") -> ReadyCore:
    """Read and check a core once, to swap it in many times; arguments and errors are those of :func:`swap_core`."""
    adapter = LoadedAdapter.of(model, adapter_name)
    require_unmerged(adapter.layers.values())
    here = adapter.basis_id
    parts = read_core(source, here).by_layer(adapter.ranks)
    cores = {name: parts[name].to(R.device, R.dtype, copy=True) for name, R in adapter.cores.items()}
    return ReadyCore(here, adapter, cores)


def get_core(model: nn.Module, adapter_name: str | None = None) -> Core:
    """Copy the core of an adapter (by default the active one).

    Raises:
        ConfigError: The model has no such frozen-core adapter.
        ModelError: A core of it is pruned, parametrised or offloaded.
    """
    return LoadedAdapter.of(model, adapter_name).core


def round_core(model: nn.Module, bits: int) -> Core:
    """Put each value of the active core at its nearest level of 8, 4 or 2 bits; 32 bits change nothing.

    Returns:
        The core that the model now has, as a file of so many bits stores it.
    """
    adapter = LoadedAdapter.of(model)
    core = adapter.core.in_bits(bits, adapter.ranks)
    if core.packed is not None:
        swap_core(model, core, adapter_name=adapter.name)
    return core


def read_core(source: CoreSource, basis_id: str) -> Core:
    """Read a core; refuse one of another basis, or with trained modules beside it."""
    if isinstance(source, Core):
        core, origin = source, "It"
    else:
        origin = "The state dict" if isinstance(source, Mapping) else str(source)
        tensors = source if isinstance(source, Mapping) else read_tensors(Path(source))
        core = Core.read(origin, tensors)
        if others := module_tensors(tensors):
            raise ArtifactError(
                f"Only cores can be swapped, but {origin} has {next(iter(others))!r} ({len(others)} in all). Load it "
                "with model.load_adapter or peft.set_peft_model_state_dict instead."
            )
    require_same_id(origin, core.basis_id, "the model has", basis_id)
    return core


def require_unmerged(layers: Iterable[FrozenCoreLinear]) -> None:
    """Refuse a merged adapter: copied values would have no effect."""
    for layer in layers:
        if layer.merged:
            raise ConfigError(
                f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() before swapping cores."
            )
