"""Swap the cores of a loaded adapter in place: nothing is allocated, and compiled code stays valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.bases import named_basis, require_layers, require_trained_alike
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.folders import read_tensors
from frozencore.adapter.layer import BasisState, FrozenCoreLinear, bases_of, frozen_core_layers
from frozencore.adapter.saved import tensors as state
from frozencore.adapter.saved.adapter import SavedAdapter
from frozencore.adapter.saved.basis import Bases, holds
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import read_config

LOAD = "Load the adapter with model.load_adapter instead."


@dataclass(frozen=True, eq=False)
class HeldBases:
    """The bases of an adapter at the moment when cores were checked against them.

    Attributes:
        bases: Kept alive, so that no other tensor gets their address.
    """

    adapter_name: str
    layers: Mapping[str, FrozenCoreLinear]
    bases: Bases
    moments: Mapping[str, object]

    @classmethod
    def of(cls, layers: Mapping[str, FrozenCoreLinear], adapter_name: str) -> HeldBases:
        bases = bases_of(layers, adapter_name)
        return cls(adapter_name, layers, bases, {name: basis.moment for name, basis in bases.items()})

    @property
    def ranks(self) -> dict[str, int]:
        """r by layer name."""
        return {name: basis.P.shape[1] for name, basis in self.bases.items()}

    def require_unmoved(self, way_out: str) -> None:
        """Refuse cores for bases and scales that the adapter no longer has, or for a deleted adapter."""
        for name, layer in self.layers.items():
            is_there = self.adapter_name in layer.frozencore_R
            if not is_there or layer.basis(self.adapter_name).moment != self.moments[name]:
                raise ConfigError(
                    f"A core works on its own basis only, but the basis of layer {name!r} of the adapter "
                    f"{self.adapter_name!r} was set, moved or deleted since. {way_out}"
                )


@dataclass(frozen=True)
class ReadyCore:
    """Cores that were checked against a loaded adapter; :meth:`swap_in` copies them.

    Attributes:
        held: The adapter's layers and bases at the time of the check.
        cores: One r x r tensor a layer, on the layer's device and in its dtype.
    """

    held: HeldBases
    cores: tuple[Tensor, ...]

    def swap_in(self) -> None:
        """Copy the cores into the loaded adapter.

        Raises:
            ConfigError: The adapter was merged into the weights, or calibrated or moved since the check.
        """
        layers, adapter_name = self.held.layers.values(), self.held.adapter_name
        require_unmerged(layers)
        self.held.require_unmoved("Call prepare_swap again.")
        with torch.no_grad():
            torch._foreach_copy_([layer.core(adapter_name) for layer in layers], list(self.cores))
        for layer in layers:
            layer.frozencore_state[adapter_name] = BasisState.READY


def swap_core(model: nn.Module, source: str | Path | Mapping[str, Tensor], *, adapter_name: str = "default") -> None:
    """Copy the cores of a saved adapter into a loaded adapter with the same bases.

    Args:
        source: A folder that ``save_pretrained`` wrote, the state dict of ``peft.get_peft_model_state_dict``, or R
            (r x r) by layer name, which do not say what basis they are of: only their layers and ranks are checked.

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
    held = HeldBases.of(layers, adapter_name)
    flat = read_cores(model, source, held)
    for dtype in {R.dtype for R in own.values()}:
        state.require_finite_in("the core", flat, dtype)
    new = state.by_layer(flat, {name: len(own[name]) for name in sorted(own)})
    cores = tuple(new[name].detach().to(R.device, R.dtype, copy=True) for name, R in own.items())
    return ReadyCore(held, cores)


def read_cores(model: Any, source: str | Path | Mapping[str, Tensor], held: HeldBases) -> Tensor:
    """Read all cores for a loaded adapter with these bases: Σr² values in the order of the layers' names."""
    require_unmerged(held.layers.values())
    config: FrozenCoreConfig = model.peft_config[held.adapter_name]
    basis_id = named_basis(config, held.layers, held.adapter_name)
    if isinstance(source, Mapping):
        origin, tensors = "the state dict", source
    elif isinstance(source, str | Path):
        origin, tensors = str(source), _read_folder(Path(source), held, basis_id)
    else:
        raise ConfigError(
            f"Cores are a folder that save_pretrained wrote, a state dict, or R by layer name, but a "
            f"{type(source).__name__} came."
        )
    flat = _flat_cores(origin, tensors, config, held, basis_id)
    state.require_size(origin, flat, sum(r * r for r in held.ranks.values()))
    return flat


def _read_folder(folder: Path, held: HeldBases, basis_id: str | None) -> Mapping[str, Tensor]:
    """Read the tensors of a folder, without the basis if it names the loaded one."""
    named = read_config(folder).get("basis_id")
    if named is None or named != basis_id:
        return read_tensors(folder)[1]
    saved = SavedAdapter.read(folder)
    config = FrozenCoreConfig.of_file(folder, saved.values)
    for name, own in held.bases.items():
        if own.scale != (theirs := config.scale_of(name)):
            raise state.other_scale(str(folder), name, theirs, own.scale)
    return saved.tensors


def _flat_cores(
    origin: str, tensors: Mapping[str, Tensor], config: FrozenCoreConfig, held: HeldBases, basis_id: str | None
) -> Tensor:
    """All cores as one vector: from R by layer name, from cores alone, or from P, Q and R of the same bases."""
    if tensors.keys() & held.layers.keys():  # R by layer name
        require_layers(origin, tensors, held.layers, LOAD)
        for name, r in held.ranks.items():
            R = tensors[name]
            if R.shape != (r, r) or not torch.isfinite(R.float()).all():
                raise ArtifactError(
                    f"The core of layer {name!r} is {r} x {r} and finite here, but one of shape {tuple(R.shape)} came, "
                    "or one with NaN or Inf."
                )
        return state.flatten_cores(tensors)
    if others := state.other_keys(tensors):
        raise ArtifactError(
            f"Only cores can be swapped, but {origin} holds {others[0]!r} ({len(others)} in all). Load it with "
            "model.load_adapter or peft.set_peft_model_state_dict instead."
        )
    if state.vector_of(tensors) is not None:
        state.require_finite(origin, tensors)
        return state.require_cores_of(origin, tensors, basis_id)
    factors = state.layer_factors(origin, tensors)
    require_layers(origin, factors, held.layers, LOAD)
    require_trained_alike(origin, tensors, config, held.layers, held.bases)
    for name, (P, Q, _) in factors.items():
        if not holds(held.bases[name], P, Q):
            raise ArtifactError(
                f"A core works on its own basis only, but layer {name!r} of the adapter {held.adapter_name!r} has "
                f"another one. {LOAD}"
            )
    return state.flatten_cores({name: R for name, (_, _, R) in factors.items()})


def require_unmerged(layers: Iterable[FrozenCoreLinear]) -> None:
    for layer in layers:
        if layer.merged:
            raise ConfigError(
                f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() before swapping cores."
            )
