"""A basis that many adapters name: whether it fits a model, and whether an adapter is still on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer, frozen_core_layers
from frozencore.adapter.seal.integrity import require_orthonormal
from frozencore.adapter.seal.same_base import differing_layer
from frozencore.adapter.seal.saved_basis import SavedBasis
from frozencore.adapter.seal.values import require_finite_in
from frozencore.errors import ArtifactError
from frozencore.maths.basis import known_basis


def require_basis_fits(
    origin: str, basis: SavedBasis, config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLayer], adapter_name: str
) -> None:
    """Refuse a basis of other layers, ranks, scales or another base model than an adapter's.

    Raises:
        ArtifactError: What differs.
    """
    if basis.layers.keys() != layers.keys():
        odd = sorted(basis.layers.keys() ^ layers.keys())
        raise ArtifactError(
            f"The basis of {origin} has {len(basis.layers)} layers and the model {len(layers)} to adapt ({odd[0]!r} in "
            "one of them alone). Load the base model that it was calibrated on."
        )
    for name, layer in layers.items():
        for X, own in zip(basis.layers[name], layer.factors(adapter_name), strict=False):
            require_finite_in(f"layer {name!r} of the basis of {origin}", X, own.dtype)
        (P, Q), scale, (m, n) = basis.layers[name], basis.scales[name], layer.shape
        r, own_scale = layer.rank(adapter_name), layer.frozencore_scale[adapter_name]
        if (P.shape, Q.shape, scale) != ((m, r), (n, r), own_scale):
            raise ArtifactError(
                f"Layer {name!r} is {m} x {n} at rank {r} and scale {own_scale:g} in this model, but the basis of "
                f"{origin} has P {tuple(P.shape)}, Q {tuple(Q.shape)} and scale {scale:g} there. Leave rank, scale and "
                "targets to the basis, and load the base model that it was calibrated on."
            )
    require_orthonormal(f"the basis of {origin}", basis.layers, config.coordinates)
    if basis.base is not None and not config.allow_other_base:
        odd_one = differing_layer(basis.base, {name: layer.base_samples for name, layer in layers.items()})
        if odd_one is not None:
            raise other_base(f"The basis of {origin}", odd_one)


def other_base(what: str, layer: str) -> ArtifactError:
    """The error that a layer's weight is not the recorded one."""
    return ArtifactError(
        f"{what} was made on another base model: the weight of layer {layer!r} differs. Load that model, or "
        "pass allow_other_base=True to PeftModel.from_pretrained to use it on this one."
    )


Placed = tuple[Tensor, Tensor, float]
"""P, Q and the scale of a layer."""


def differing_basis(one: Mapping[str, Placed], other: Mapping[str, Placed]) -> str | None:
    """The first layer, by name, that has another basis or scale in one of them, or none; None where all are equal."""
    return next((name for name in sorted(one.keys() | other.keys()) if not _same(one.get(name), other.get(name))), None)


def _same(one: Placed | None, other: Placed | None) -> bool:
    if one is None or other is None:
        return False
    pairs = zip(one[:2], other[:2], strict=True)
    return one[2] == other[2] and all(X.shape == Y.shape and X.dtype == Y.dtype and torch.equal(X, Y) for X, Y in pairs)


def require_one_basis(first: str, one: Mapping[str, Placed], second: str, other: Mapping[str, Placed]) -> None:
    """Refuse adapters whose cores cannot be summed.

    Raises:
        ArtifactError: The first layer in which they differ.
    """
    layer = differing_basis(one, other)
    if layer is None:
        return
    raise ArtifactError(
        f"Cores are summed on one basis, but the adapters {first} and {second} differ in basis, rank or scale at layer "
        f"{layer!r}. Sum adapters that were trained on the same saved basis."
    )


def lay_named_basis(configs: Mapping[str, FrozenCoreConfig], adapter_name: str, model: nn.Module) -> None:
    """Set P and Q of a new adapter to the basis that it names: another adapter's in the model, or from its folder.

    Args:
        configs: Of all adapters of the model.

    Raises:
        ArtifactError: The basis is not to be found, or does not fit the model.
    """
    config, layers = configs[adapter_name], frozen_core_layers(model, adapter_name)
    origin = f"the adapter {adapter_name!r}"
    bases = _held_basis(configs, adapter_name, model)
    if bases is None:
        basis = config.find_basis(origin)
        require_basis_fits(origin, basis, config, layers, adapter_name)
        bases = basis.layers
    elif bases.keys() != layers.keys():
        raise ArtifactError(f"The basis of {origin} has other layers than its target_modules. Save it again.")
    for name, layer in layers.items():
        if not layer.frozencore_P[adapter_name].is_meta:
            layer.set_basis(adapter_name, known_basis(*bases[name]), random_core=not config.init_weights)
        if config.load_bases:
            layer.awaits_core.add(adapter_name)


def _held_basis(
    configs: Mapping[str, FrozenCoreConfig], adapter_name: str, model: nn.Module
) -> dict[str, tuple[Tensor, Tensor]] | None:
    for other, config in configs.items():
        if other != adapter_name and config.basis_id == configs[adapter_name].basis_id:
            bases = {name: layer.factors(other)[:2] for name, layer in frozen_core_layers(model, other).items()}
            if not any(X.is_meta for pair in bases.values() for X in pair):
                return bases
    return None
