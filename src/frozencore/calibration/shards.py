"""Calibration on several ranks: each sums its own examples, and each layer has one owner, which builds its basis.

The sums are reduced once: matrices to the layer's owner, vectors and counts to all. The owners' bases then go to every
rank, so that all hold the same bytes. Without a process group there is one rank, which owns every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from frozencore.device import is_out_of_memory
from frozencore.errors import CalibrationError, TrainingError
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.maths.basis import Basis
from frozencore.maths.linalg import Shape
from frozencore.maths.moments import LayerMoments
from frozencore.words import one_line

T = TypeVar("T")
_BY_ITSELF = ContextVar("by itself", default=False)
FINE, NO_ROOM, FAILED = 0, 1, 2  # how a rank's work ended


def num_ranks() -> int:
    """How many processes calibrate together; 1 without an initialised process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _BY_ITSELF.get() else 1


def own_rank() -> int:
    """This process's place among them."""
    return dist.get_rank() if num_ranks() > 1 else 0


@contextmanager
def by_itself() -> Iterator[None]:
    """Inside, this rank works as if there were no others: nothing is summed, shared or waited for."""
    before = _BY_ITSELF.set(True)
    try:
        yield
    finally:
        _BY_ITSELF.reset(before)


def assign_owners(shapes: Mapping[str, Shape], ranks: int | None = None) -> dict[str, int]:
    """A rank for each layer, such that the work of the SVDs, about ``m n min(m, n)``, is spread evenly.

    Args:
        ranks: How many there are; those of the process group by default.
    """
    return spread({name: _svd_cost(shape) for name, shape in shapes.items()}, ranks or num_ranks())


def spread(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """A rank for each thing that costs, by name, such that all have about the same to do: the dearest ones first."""
    load = [0] * ranks
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(ranks), key=load.__getitem__)
        load[owners[name]] += costs[name]
    return owners


@contextmanager
def all_ranks_or_none() -> Iterator[None]:
    """Work that every rank does on its own, and that none goes on from if one of them failed.

    Raises:
        CalibrationError: Another rank failed or is gone; the one that failed raises its own error.
        torch.OutOfMemoryError: On every rank, if some had no room and none failed otherwise: all may try less together.
    """
    if num_ranks() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        _compare_endings(NO_ROOM if is_out_of_memory(error) else FAILED)
        raise
    _compare_endings(FINE)


def _compare_endings(own: int) -> None:
    """Raise if the work of another rank ended worse than this one's."""
    endings = torch.zeros(num_ranks(), dtype=torch.long, device=_device())
    endings[own_rank()] = own
    _together(partial(dist.all_reduce, endings))
    worst, rank = int(endings.max()), int(endings.argmax())
    if worst == own:
        return
    if worst == NO_ROOM:
        raise torch.OutOfMemoryError(f"Rank {rank} ran out of memory.")
    raise CalibrationError(f"Calibration failed on rank {rank}; its own message says why.")


def from_first(work: Callable[[], T]) -> T:
    """What the first rank's work gives, on all of them; the others wait for it, and it must be a plain object.

    Raises:
        TrainingError: On the other ranks, where it failed on the first, which raises its own error.
    """
    if num_ranks() == 1:
        return work()
    held: list[tuple[T | None, str | None]] = [(None, None)]
    failed: Exception | None = None
    if own_rank() == 0:
        try:
            held = [(work(), None)]
        except Exception as error:
            failed, held = error, [(None, str(error))]
    _together(partial(dist.broadcast_object_list, held))
    if failed is not None:
        raise failed
    found, reason = held[0]
    if reason is not None:
        raise TrainingError(f"Rank 0 failed: {reason}")
    return cast(T, found)


def wait_for_all() -> None:
    """Until every rank has come here; at once without a process group."""
    if num_ranks() > 1:
        _together(dist.barrier)


def reduce_moments(moments: Mapping[str, LayerMoments], owners: Mapping[str, int]) -> dict[str, LayerMoments]:
    """The sums over all ranks. Matrices reach the owner alone: elsewhere a layer keeps its count and its vectors."""
    if num_ranks() == 1:
        return dict(moments)
    return {name: _reduce(layer, owners[name]) for name, layer in moments.items()}


def sum_over_ranks(total: Tensor) -> Tensor:
    """The sum of every rank's tensor, on all of them; the tensor itself without a process group."""
    if num_ranks() == 1:
        return total
    summed = total.to(_device())
    _together(partial(dist.all_reduce, summed))
    return summed.to(total.device)


def largest_over_ranks(number: int) -> int:
    """The largest of every rank's numbers, on all of them."""
    if num_ranks() == 1:
        return number
    largest = torch.tensor(number, device=_device())
    _together(partial(dist.all_reduce, largest, op=dist.ReduceOp.MAX))
    return int(largest)


def _reduce(layer: LayerMoments, owner: int) -> LayerMoments:
    count = torch.tensor(layer.num_tokens, device=_device())
    _together(partial(dist.all_reduce, count))
    sums: dict[str, Tensor | None] = {}
    for name in layer.names():
        total = getattr(layer, name).to(_device())
        is_vector = total.ndim == 1
        _together(partial(dist.all_reduce, total) if is_vector else partial(dist.reduce, total, dst=owner))
        sums[name] = total if is_vector or owner == own_rank() else None
    return LayerMoments(num_tokens=int(count), **sums)


def share_bases(
    own: Mapping[str, Basis], owners: Mapping[str, int], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Basis]:
    """Every layer's basis on every rank, from the owners.

    Args:
        own: The bases that this rank built.
        factors: The P and Q that they are for: their shapes, in the same order on all ranks.
    """
    if num_ranks() == 1:
        return dict(own)
    return {name: _share(own.get(name), owners[name], P.shape, Q.shape) for name, (P, Q) in factors.items()}


def require_same_bases(factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse to go on where the ranks hold different P or Q, or adapt different layers; every rank calls it.

    Raises:
        CalibrationError: The first layer that differs, and the rank, are named.
    """
    if num_ranks() == 1:
        return
    held = _of_every_rank({name: fingerprint_tensors(zip("PQ", pair, strict=True)) for name, pair in factors.items()})
    for rank, theirs in enumerate(held):
        odd = [name for name in held[0] | theirs if held[0].get(name) != theirs.get(name)]
        if odd:
            raise CalibrationError(
                f"All ranks train one core between the same bases, but layer {odd[0]!r} ({len(odd)} in all) has others "
                f"on rank {rank} than on rank 0. Call calibrate on every rank, or load the same adapter on all."
            )


def gathered(own: Mapping[str, T]) -> dict[str, T]:
    """By name, what every rank has of its own layers: small plain objects, on all ranks."""
    if num_ranks() == 1:
        return dict(own)
    return {name: found for theirs in _of_every_rank(own) for name, found in theirs.items()}


def _of_every_rank(own: Mapping[str, T]) -> list[dict[str, T]]:
    held: list[dict[str, T]] = [{}] * num_ranks()
    _together(partial(dist.all_gather_object, held, dict(own)))
    return held


def _share(basis: Basis | None, owner: int, P_shape: torch.Size, Q_shape: torch.Size) -> Basis:
    head = torch.zeros(3, dtype=torch.long, device=_device())
    if basis is not None:
        head.copy_(torch.tensor([len(basis.spectrum), basis.effective_rank, int(basis.initial_core is not None)]))
    _broadcast(head, owner)
    spectrum_length, effective, has_core = head.tolist()
    r = P_shape[1]

    def shared(tensor: Tensor | None, *size: int) -> Tensor:
        whole = torch.empty(size, device=_device()) if tensor is None else tensor.to(_device()).contiguous()
        _broadcast(whole, owner)
        return whole

    return Basis(
        P=shared(basis.P if basis else None, *P_shape),
        Q=shared(basis.Q if basis else None, *Q_shape),
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
        reason = one_line(error).partition(". ")[0]
        raise CalibrationError(f"A rank died or stopped answering ({reason}). Start all ranks again.") from error


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _svd_cost(shape: Shape) -> int:
    return shape[0] * shape[1] * min(shape)
