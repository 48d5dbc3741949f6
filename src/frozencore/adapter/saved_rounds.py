"""The cores of an adapter of several rounds, as one matrix in its file and as what trains and what does not in a model.

Shapes: k = r times the rounds; whole k x k, past k x k with zeros in the last r rows and columns, R r x r.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.layer import FrozenCoreLayer
from frozencore.adapter.rounds import with_last_core, without_last_core
from frozencore.adapter.seal.factors import BASE, PREFIX

_PAST, _CORE = f".{PREFIX}past", f".{PREFIX}R"


def with_whole_cores(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Past and R of each layer as one tensor under the name of R, from PEFT's state dict of one adapter."""
    joined = dict(tensors)
    for key in tensors:
        layer, found, adapter = key.partition(_PAST)
        if found:
            name = f"{layer}{_CORE}{adapter}.weight"
            joined[name] = with_last_core(joined.pop(key), joined[name])
    return joined


def with_last_cores(
    tensors: Mapping[str, Tensor], layers: Mapping[str, FrozenCoreLayer], adapter_name: str
) -> dict[str, Tensor]:
    """The inverse, for the layers of a model that have room for it."""
    split = dict(tensors)
    for name, layer in layers.items():
        r = len(layer.core(adapter_name))
        if layer.rank(adapter_name) == r:
            continue
        key = next(key for key in tensors if key.removeprefix(BASE) == f"{name}{_CORE}.weight")
        split[key.removesuffix(f"{_CORE}.weight") + _PAST], split[key] = without_last_core(tensors[key], r)
    return split


def make_room(
    config: FrozenCoreConfig, layers: Mapping[str, FrozenCoreLayer], adapter_name: str, tensors: Mapping[str, Tensor]
) -> None:
    """Let an adapter that is being refreshed take the rounds of one of its checkpoints."""
    if not config.refreshes:
        return
    found = {key.removeprefix(BASE): tensor for key, tensor in tensors.items()}
    for name, layer in layers.items():
        P, r = found.get(f"{name}.{PREFIX}P"), len(layer.core(adapter_name))
        if P is not None and P.ndim == 2 and r and P.shape[1] % r == 0:
            config.rounds = P.shape[1] // r
            layer.set_rounds(adapter_name, config.rounds)
