"""Calibration on several ranks: each rank sums its own examples, and each layer has one owner, which builds its basis.

The sums are reduced once: matrices to the layer's owner, vectors and counts to all ranks. The owners then send their
bases to every rank, so that all ranks hold the same bytes. Without a process group one rank owns every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from frozencore.errors import CalibrationError
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.maths.basis import Basis
from frozencore.maths.linalg import Shape
from frozencore.maths.moments import LayerMoments
from frozencore.ranks import (
    call_collective,
    exchange_device,
    num_ranks,
    of_every_rank,
    own_rank,
    spread,
    sum_over_ranks,
)


def assign_owners(shapes: Mapping[str, Shape], ranks: int | None = None) -> dict[str, int]:
    """Assign each layer to a rank so that the work of the SVDs, about ``m n min(m, n)``, is balanced.

    Args:
        ranks: The number of ranks; by default the size of the process group.
    """
    return spread({name: m * n * min(m, n) for name, (m, n) in shapes.items()}, ranks or num_ranks())


def reduce_moments(moments: Mapping[str, LayerMoments], owners: Mapping[str, int]) -> dict[str, LayerMoments]:
    """Sum over all ranks. The owner gets a layer's matrices; all ranks get its count and its vectors."""
    if num_ranks() == 1:
        return dict(moments)
    reduced = {}
    for name, layer in moments.items():
        sums: dict[str, Tensor | None] = {}
        for moment in layer.names():
            total = getattr(layer, moment).to(exchange_device())
            if total.ndim == 1:
                sums[moment] = sum_over_ranks(total)
            else:
                call_collective(partial(dist.reduce, total, dst=owners[name]))
                sums[moment] = total if owners[name] == own_rank() else None
        reduced[name] = LayerMoments(num_tokens=int(sum_over_ranks(torch.tensor(layer.num_tokens))), **sums)
    return reduced


def share_bases(
    own: Mapping[str, Basis], owners: Mapping[str, int], shapes: Mapping[str, tuple[int, int, int]]
) -> dict[str, Basis]:
    """Send every layer's basis from its owner to all ranks.

    Args:
        own: The bases that this rank built.
        shapes: (m, n, r) of the layers, in the same order on all ranks.
    """
    if num_ranks() == 1:
        return dict(own)
    return {name: _share(own.get(name), owners[name], *shape) for name, shape in shapes.items()}


def _share(basis: Basis | None, owner: int, m: int, n: int, r: int) -> Basis:
    head = torch.zeros(3, dtype=torch.long)
    if basis is not None:
        head = torch.tensor([len(basis.spectrum), basis.effective_rank, int(basis.initial_core is not None)])

    def shared(tensor: Tensor | None, *size: int) -> Tensor:
        whole = torch.empty(size) if tensor is None else tensor
        whole = whole.to(exchange_device()).contiguous()
        call_collective(partial(dist.broadcast, whole, src=owner))
        return whole

    spectrum_length, effective, has_core = shared(head, 3).tolist()
    return Basis(
        P=shared(basis.P if basis else None, m, r),
        Q=shared(basis.Q if basis else None, n, r),
        spectrum=shared(basis.spectrum if basis else None, spectrum_length),
        effective_rank=effective,
        initial_core=shared(basis.initial_core if basis else None, r, r) if has_core else None,
    )


def require_same_bases(factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Check that all ranks adapt the same layers with the same P and Q; every rank must call it.

    Raises:
        CalibrationError: A layer differs; the message names the first such layer and the rank.
    """
    if num_ranks() == 1:
        return
    held = of_every_rank({name: fingerprint_tensors(zip("PQ", pair, strict=True)) for name, pair in factors.items()})
    for rank, theirs in enumerate(held):
        odd = [name for name in held[0] | theirs if held[0].get(name) != theirs.get(name)]
        if odd:
            raise CalibrationError(
                f"All ranks must have the same bases, but those of layer {odd[0]!r} ({len(odd)} in all) differ between "
                f"rank {rank} and rank 0. Call calibrate on every rank, or load the same adapter on all."
            )
