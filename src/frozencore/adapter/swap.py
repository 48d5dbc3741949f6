"""Another trained core under a loaded adapter, in place: nothing is allocated, and compiled code stays valid.

Cores that were trained on one basis differ by r x r numbers per layer, so that a server may hold one model and change
its task between two requests. Reading and comparing the bases takes milliseconds, the copy itself a fraction of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.saved.folder import read_adapter
from frozencore.adapter.saved.seal import read_folder
from frozencore.adapter.saved.tensors import (
    FLAT,
    PREFIX,
    Factors,
    flatten_cores,
    layer_factors,
    require_finite,
    require_finite_in,
    require_size,
    split_cores,
)
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.adapter_folder import read_config


@dataclass(frozen=True)
class ReadyCore:
    """Cores that were checked against a loaded adapter and lie beside it; :meth:`swap_in` is one copy.

    Attributes:
        bases: P and Q of each layer and their versions when they were compared.
        cores: One r x r tensor a layer, in the device and dtype of the layer's.
    """

    adapter_name: str
    layers: tuple[FrozenCoreLayer, ...]
    bases: tuple[tuple[Tensor, int, Tensor, int], ...]
    cores: tuple[Tensor, ...]

    def swap_in(self) -> None:
        """Copy the cores into the loaded adapter.

        Raises:
            ConfigError: The adapter was merged into the weights, or calibrated or moved since it was compared.
        """
        targets = []
        for layer, (old_P, P_version, old_Q, Q_version) in zip(self.layers, self.bases, strict=True):
            P, Q, R = layer.factors(self.adapter_name)
            if layer.merged:
                raise ConfigError(
                    f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() before swapping cores."
                )
            if P is not old_P or Q is not old_Q or P._version != P_version or Q._version != Q_version:
                raise ConfigError(
                    f"A core means something on its own basis only, but that of layer {layer.name!r} of the adapter "
                    f"{self.adapter_name!r} was set or moved since. Call prepare_swap again."
                )
            targets.append(R)
        with torch.no_grad():
            torch._foreach_copy_(targets, list(self.cores))


def swap_core(model: nn.Module, source: str | Path | Mapping[str, Tensor], *, adapter_name: str = "default") -> None:
    """Copy the cores of a saved adapter into the tensors of a loaded one. Its bases must be the same.

    Args:
        source: A folder that ``save_pretrained`` wrote, or the state dict of ``peft.get_peft_model_state_dict``, which
            does not say its scale: it is taken to be the loaded adapter's.

    Raises:
        ConfigError: The model has no such adapter, or it is merged into the weights.
        ArtifactError: Other layers, ranks, scales or bases, or trained modules besides cores. Nothing is copied then.
    """
    prepare_swap(model, source, adapter_name=adapter_name).swap_in()


def prepare_swap(
    model: nn.Module, source: str | Path | Mapping[str, Tensor], *, adapter_name: str = "default"
) -> ReadyCore:
    """Read and check the cores of a saved adapter once, to swap them in many times; as :func:`swap_core` otherwise."""
    layers = frozen_core_layers(model, adapter_name)
    if not layers:
        raise ConfigError(f"swap_core needs a frozen-core adapter, but the model has none called {adapter_name!r}.")
    configs: Any = model.peft_config
    configs[adapter_name].require_one_round("A swap of cores")
    ranks = {name: layer.rank(adapter_name) for name, layer in layers.items()}
    flat = flat_cores_of(source, layers, adapter_name, configs[adapter_name].basis_id)
    for dtype in {layer.core(adapter_name).dtype for layer in layers.values()}:
        require_finite_in("the core", flat, dtype)
    new = split_cores(str(source), flat, ranks)
    bases, cores = [], []
    for name, layer in layers.items():
        P, Q, R = layer.factors(adapter_name)
        bases.append((P, P._version, Q, Q._version))
        cores.append(new[name].detach().to(R.device, R.dtype, copy=True))
    return ReadyCore(adapter_name, tuple(layers.values()), tuple(bases), tuple(cores))


def flat_cores_of(
    source: str | Path | Mapping[str, Tensor],
    layers: Mapping[str, FrozenCoreLayer],
    adapter_name: str,
    basis_id: str | None,
) -> Tensor:
    """All cores (Σr² values, layers by name) of a saved adapter, a state dict of PEFT's, or R by layer name.

    Of an adapter of cores alone on the same named basis nothing else is read.

    Args:
        layers: Of a loaded adapter, on whose basis the cores are to be.
        basis_id: Of the loaded adapter.
    """
    for layer in layers.values():
        if layer.merged:
            raise ConfigError(
                f"Layer {layer.name!r} has merged adapters. Call unmerge_adapter() before swapping cores."
            )
    if not isinstance(source, str | Path | Mapping):
        raise ConfigError(
            f"Cores are a folder that save_pretrained wrote, a state dict, or R by layer name, but a "
            f"{type(source).__name__} came."
        )
    if isinstance(source, str | Path):
        if basis_id is not None and read_config(Path(source)).get("basis_id") == basis_id:
            return _of_size(str(source), _cores_alone(Path(source)), layers, adapter_name)
        factors = _read_folder(source, layers, adapter_name)
    elif source.keys() == {FLAT}:
        require_finite("the state dict", source, "Train it again.")
        return _of_size("the state dict", source[FLAT], layers, adapter_name)
    elif source.keys() & layers.keys():
        return flatten_cores(_checked(source, layers, adapter_name))
    else:
        factors = _read_state(source)
    _require_same_layers(factors, layers)
    for name, layer in layers.items():
        _require_same_basis(layer, adapter_name, factors[name])
    return flatten_cores({name: factors[name].R for name in layers})


def _of_size(origin: str, flat: Tensor, layers: Mapping[str, FrozenCoreLayer], adapter_name: str) -> Tensor:
    require_size(origin, flat, sum(layer.rank(adapter_name) ** 2 for layer in layers.values()))
    return flat


def _checked(
    cores: Mapping[str, Tensor], layers: Mapping[str, FrozenCoreLayer], adapter_name: str
) -> Mapping[str, Tensor]:
    _require_same_layers(cores, layers)
    for name, layer in layers.items():
        r = layer.rank(adapter_name)
        if cores[name].shape != (r, r) or not torch.isfinite(cores[name].float()).all():
            raise ArtifactError(
                f"The core of layer {name!r} is {r} x {r} and finite here, but one of shape "
                f"{tuple(cores[name].shape)} came, or one with NaN or Inf."
            )
    return cores


def _cores_alone(folder: Path) -> Tensor:
    _, tensors = read_folder(folder)
    if tensors.keys() != {FLAT}:
        raise _more_than_cores(folder)
    return tensors[FLAT]


def _more_than_cores(folder: str | Path) -> ArtifactError:
    return ArtifactError(
        f"The adapter in {folder} trained more than cores (modules_to_save or trainable_token_indices), which are "
        "not swapped. Load it with model.load_adapter instead."
    )


def _require_same_layers(came: Mapping[str, object], layers: Mapping[str, FrozenCoreLayer]) -> None:
    if came.keys() != layers.keys():
        odd = sorted(came.keys() ^ layers.keys())
        raise ArtifactError(
            f"Cores can be swapped between adapters of the same layers, but {odd[0]!r} ({len(odd)} in all) has a core "
            "on one side only. Load the adapter with model.load_adapter instead."
        )


def _read_folder(folder: str | Path, layers: Mapping[str, FrozenCoreLayer], adapter_name: str) -> dict[str, Factors]:
    config, factors = read_adapter(folder)
    if config.trains_modules:
        raise _more_than_cores(folder)
    for name in factors.keys() & layers.keys():
        mine, theirs = layers[name].frozencore_scale[adapter_name], config.scale_of(name)
        if mine != theirs:
            raise ArtifactError(
                f"The core of layer {name!r} was trained at scale {theirs:g}, but the adapter {adapter_name!r} has "
                f"{mine:g}. Load it with model.load_adapter instead."
            )
    return factors


def _read_state(state: Mapping[str, Tensor]) -> dict[str, Factors]:
    others = [key for key in state if f".{PREFIX}" not in key]
    if others:
        raise ArtifactError(
            f"Only cores can be swapped, but the state dict holds {others[0]!r} ({len(others)} in all). "
            "Load it with peft.set_peft_model_state_dict instead."
        )
    return layer_factors("the state dict", state)


def _require_same_basis(layer: FrozenCoreLayer, adapter_name: str, new: Factors) -> None:
    P, Q, _ = layer.factors(adapter_name)
    for mine, theirs in ((P, new.P), (Q, new.Q)):
        if mine.shape != theirs.shape or not torch.equal(mine, theirs.to(mine.device, mine.dtype)):
            raise ArtifactError(
                f"A core means something on its own basis only, but layer {layer.name!r} of the adapter "
                f"{adapter_name!r} has another one. Load the adapter with model.load_adapter instead."
            )
