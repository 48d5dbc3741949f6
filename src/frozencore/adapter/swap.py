"""Replace the core of a loaded adapter in place: nothing is allocated, and compiled code stays valid.

Adapters on one basis differ only in r x r numbers per layer. So a server can hold one model and change its task between
two requests. Reading and comparing the bases takes milliseconds; the copy takes a fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.folders import read_tensors
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers, version_of
from frozencore.adapter.saved.state import (
    BASE,
    FLAT,
    MARK,
    PREFIX,
    flatten_cores,
    layer_factors,
    read_folder,
    require_finite,
    require_finite_in,
    require_marked,
    require_size,
    split_cores,
)
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import read_config

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
    layers: tuple[FrozenCoreLayer, ...]
    bases: HeldBases
    cores: tuple[Tensor, ...]

    def swap_in(self) -> None:
        """Copy the cores into the loaded adapter.

        Raises:
            ConfigError: The adapter was merged into the weights, or calibrated or moved since the check.
        """
        for layer in self.layers:
            _require_unmerged(layer)
        require_unmoved(self.layers, self.adapter_name, self.bases, "Call prepare_swap again.")
        targets = [layer.factors(self.adapter_name)[2] for layer in self.layers]
        with torch.no_grad():
            torch._foreach_copy_(targets, list(self.cores))
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
    configs: Any = model.peft_config
    flat = read_cores(source, layers, adapter_name, configs[adapter_name])
    for dtype in {layer.core(adapter_name).dtype for layer in layers.values()}:
        require_finite_in("the core", flat, dtype)
    new = split_cores(str(source), flat, {name: len(layer.core(adapter_name)) for name, layer in layers.items()})
    cores = []
    for name, layer in layers.items():
        R = layer.factors(adapter_name)[2]
        cores.append(new[name].detach().to(R.device, R.dtype, copy=True))
    here = tuple(layers.values())
    return ReadyCore(adapter_name, here, held_bases(here, adapter_name), tuple(cores))


def held_bases(layers: Iterable[FrozenCoreLayer], adapter_name: str) -> HeldBases:
    """P and Q of an adapter as they are now."""
    factors = (layer.factors(adapter_name) for layer in layers)
    return tuple((P, version_of(P), Q, version_of(Q)) for P, Q, _ in factors)


def require_unmoved(layers: Iterable[FrozenCoreLayer], adapter_name: str, held: HeldBases, way_out: str) -> None:
    """Refuse cores that were made for bases which an adapter no longer has."""
    for layer, old in zip(layers, held, strict=True):
        P, Q, _ = layer.factors(adapter_name)
        if P is not old[0] or Q is not old[2] or (version_of(P), version_of(Q)) != (old[1], old[3]):
            raise ConfigError(
                f"A core works on its own basis only, but the basis of layer {layer.name!r} of the adapter "
                f"{adapter_name!r} was set or moved since. {way_out}"
            )


def read_cores(
    source: str | Path | Mapping[str, Tensor],
    layers: Mapping[str, FrozenCoreLayer],
    adapter_name: str,
    config: FrozenCoreConfig,
) -> Tensor:
    """Read all cores of a saved adapter, a state dict of PEFT's, or R by layer name, for a loaded adapter.

    If the saved adapter names the loaded adapter's basis, its basis is not read.

    Args:
        layers: The layers of the loaded adapter, with the required basis.
        config: The configuration of the loaded adapter.

    Returns:
        Σr² values, layer by layer in the order of the layers' names.
    """
    for layer in layers.values():
        _require_unmerged(layer)
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
    require_size(origin, flat, sum(len(layer.core(adapter_name)) ** 2 for layer in layers.values()))
    return flat


def _flat_cores(
    origin: str,
    tensors: Mapping[str, Tensor],
    layers: Mapping[str, FrozenCoreLayer],
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
        return flatten_cores(tensors)
    if others := [key for key in tensors if f".{PREFIX}" not in key and key not in (FLAT, MARK)]:
        raise ArtifactError(
            f"Only cores can be swapped, but {origin} holds {others[0]!r} ({len(others)} in all). Load it with "
            "model.load_adapter or peft.set_peft_model_state_dict instead."
        )
    if FLAT in tensors:
        require_finite(origin, tensors)
        require_marked(origin, tensors, basis_id)
        return tensors[FLAT]
    factors = layer_factors(origin, tensors)
    _require_same_layers(factors, layers)
    for name, layer in layers.items():
        for mine, theirs in zip(layer.factors(adapter_name), (factors[name].P, factors[name].Q), strict=False):
            if mine.shape != theirs.shape or not torch.equal(mine, theirs.to(mine.device, mine.dtype)):
                raise ArtifactError(
                    f"A core works on its own basis only, but layer {name!r} of the adapter {adapter_name!r} has "
                    "another one. Load the adapter with model.load_adapter instead."
                )
    return flatten_cores({name: factors[name].R for name in layers})


def _read_folder(
    folder: Path, layers: Mapping[str, FrozenCoreLayer], adapter_name: str, config: FrozenCoreConfig
) -> Mapping[str, Tensor]:
    named = read_config(folder).get("basis_id")
    if named is not None and named == config.basis_id:
        values, tensors = read_folder(folder)
        theirs_config, held = FrozenCoreConfig.of_file(folder, values), set(layers)
    else:
        theirs_config, tensors = read_tensors(folder)
        held = layers.keys() & {key.removeprefix(BASE).partition(f".{PREFIX}")[0] for key in tensors}
    for name in held:
        mine, theirs = layers[name].frozencore_scale[adapter_name], theirs_config.scale_of(name)
        if mine != theirs:
            raise ArtifactError(
                f"The core of layer {name!r} was trained at scale {theirs:g}, but the adapter {adapter_name!r} has "
                f"{mine:g}. Load it with model.load_adapter instead."
            )
    return tensors


def _require_unmerged(layer: FrozenCoreLayer) -> None:
    if layer.merged:
        raise ConfigError(f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() before swapping cores.")


def _require_same_layers(came: Mapping[str, object], layers: Mapping[str, FrozenCoreLayer]) -> None:
    if came.keys() != layers.keys():
        odd = sorted(came.keys() ^ layers.keys())
        raise ArtifactError(
            f"Cores can be swapped between adapters of the same layers, but {odd[0]!r} ({len(odd)} in all) has a core "
            "on one side only. Load the adapter with model.load_adapter instead."
        )
