"""Calibration on several ranks: each sums its own examples, and each layer has one owner, which builds its basis.

The sums are reduced once, each layer's to its owner; the owners' bases then go to every rank, so that all hold the same
bytes. Without a process group there is one rank, which owns every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from frozencore.basis import Basis
from frozencore.errors import CalibrationError
from frozencore.moments import LayerMoments

Shape = tuple[int, int]


def num_ranks() -> int:
    """How many processes calibrate together; 1 without an initialised process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """This process's place among them."""
    return dist.get_rank() if num_ranks() > 1 else 0


def assign_owners(shapes: Mapping[str, Shape], ranks: int) -> dict[str, int]:
    """A rank for each layer, such that the work of the SVDs, about ``m n min(m, n)``, is spread evenly."""
    load = [0] * ranks
    owners = {}
    for name in sorted(shapes, key=lambda name: (-_svd_cost(shapes[name]), name)):
        owners[name] = min(range(ranks), key=load.__getitem__)
        load[owners[name]] += _svd_cost(shapes[name])
    return owners


def agree_on_success(error: Exception | None) -> None:
    """Raise on every rank if a rank failed: its own error there, a line that names the rank elsewhere.

    Raises:
        CalibrationError: Another rank failed or is gone.
    """
    if num_ranks() > 1:
        failed = torch.full((num_ranks(),), 0, device=_device())
        failed[own_rank()] = int(error is not None)
        _together(partial(dist.all_reduce, failed))
        if error is None and failed.any():
            raise CalibrationError(f"Calibration failed on rank {int(failed.argmax())}; its own message says why.")
    if error is not None:
        raise error


def reduce_to_owners(moments: Mapping[str, LayerMoments], owners: Mapping[str, int]) -> dict[str, LayerMoments]:
    """The whole sums of the layers that this rank owns; the others are dropped."""
    if num_ranks() == 1:
        return dict(moments)
    mine = {}
    for name, layer in moments.items():
        counts = torch.tensor(layer.num_tokens, device=_device())
        sums = {moment: getattr(layer, moment).to(_device()) for moment in layer.names()}
        for tensor in (counts, *sums.values()):
            _together(partial(dist.reduce, tensor, dst=owners[name]))
        if owners[name] == own_rank():
            mine[name] = replace(layer, num_tokens=int(counts), **sums)
    return mine


def share_bases(
    own: Mapping[str, Basis], owners: Mapping[str, int], shapes: Mapping[str, Shape], ranks_of: Mapping[str, int]
) -> dict[str, Basis]:
    """Every layer's basis on every rank, from the owners.

    Args:
        own: The bases that this rank built.
        shapes, ranks_of: (m, n) and r of every layer, in the same order on all ranks.
    """
    if num_ranks() == 1:
        return dict(own)
    return {name: _share(own.get(name), owners[name], shapes[name], ranks_of[name]) for name in shapes}


def _share(basis: Basis | None, owner: int, shape: Shape, r: int) -> Basis:
    head = torch.zeros(3, dtype=torch.long, device=_device())
    if basis is not None:
        head.copy_(torch.tensor([len(basis.spectrum), basis.effective_rank, int(basis.initial_core is not None)]))
    _broadcast(head, owner)
    spectrum_length, effective, has_core = head.tolist()

    def shared(tensor: Tensor | None, *size: int) -> Tensor:
        whole = torch.empty(size, device=_device()) if tensor is None else tensor.to(_device()).contiguous()
        _broadcast(whole, owner)
        return whole

    return Basis(
        P=shared(basis.P if basis else None, shape[0], r),
        Q=shared(basis.Q if basis else None, shape[1], r),
        spectrum=shared(basis.spectrum if basis else None, spectrum_length),
        effective_rank=effective,
        initial_core=shared(basis.initial_core if basis else None, r, r) if has_core else None,
    )


def _broadcast(tensor: Tensor, owner: int) -> None:
    _together(partial(dist.broadcast, tensor, src=owner))


def _together(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:  # a peer is gone, or the group's timeout ran out
        raise CalibrationError(
            f"A rank stopped answering during calibration ({str(error).splitlines()[0]}). Start all ranks again."
        ) from error


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _svd_cost(shape: Shape) -> int:
    return shape[0] * shape[1] * min(shape)
