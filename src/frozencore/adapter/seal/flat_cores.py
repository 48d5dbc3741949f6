"""The cores of an adapter as one tensor: Σr² values, layer by layer in the order of the layers' names.

One tensor a layer would cost more than it holds: at Qwen2.5-3B the names and shapes of 144 cores take 17 KB, their
values 147.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from frozencore.adapter.seal.factors import BASE, PREFIX, is_usable_float
from frozencore.errors import ArtifactError

FLAT = f"{PREFIX}cores"


def flatten_cores(cores: Mapping[str, Tensor]) -> Tensor:
    """R (r x r) by layer name as one vector, where the first of them lies."""
    values = [cores[name].detach().reshape(-1) for name in sorted(cores)]
    return torch.cat([value.to(values[0].device) for value in values])


def require_size(origin: str, flat: Tensor, size: int) -> None:
    """Refuse cores of other ranks.

    Raises:
        ArtifactError: It is no vector of so many floats.
    """
    if flat.ndim != 1 or not is_usable_float(flat) or flat.numel() != size:
        raise ArtifactError(
            f"The cores of this basis are {size} numbers, but {origin} holds {flat.dtype} {tuple(flat.shape)}. They "
            "are of another basis, or damaged: save or download them again."
        )


def split_cores(origin: str, flat: Tensor, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of the vector as R (r x r) by layer name.

    Raises:
        ArtifactError: It has not the Σr² values of those ranks.
    """
    require_size(origin, flat, sum(r * r for r in ranks.values()))
    return by_layer(flat, {name: ranks[name] for name in sorted(ranks)})


def by_layer(flat: Tensor, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Views (..., r, r) of what lies side by side (..., Σr²), in the order of the ranks."""
    parts = flat.split([r * r for r in ranks.values()], dim=-1)
    return {name: part.unflatten(-1, (r, r)) for part, (name, r) in zip(parts, ranks.items(), strict=True)}


def with_factors(
    origin: str, tensors: Mapping[str, Tensor], bases: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of an adapter file with P, Q and R of every layer in place of the one of all cores.

    Raises:
        ArtifactError: The cores have not the ranks of the bases.
    """
    cores = split_cores(origin, tensors[FLAT], {name: P.shape[1] for name, (P, _) in bases.items()})
    whole = {name: tensor for name, tensor in tensors.items() if name != FLAT}
    for name, (P, Q) in bases.items():
        whole |= {f"{BASE}{name}.{PREFIX}P": P, f"{BASE}{name}.{PREFIX}Q": Q}
        whole[f"{BASE}{name}.{PREFIX}R.weight"] = cores[name].clone()
    return whole
