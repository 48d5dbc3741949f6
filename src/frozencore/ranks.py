"""Process groups: how many ranks work together, which one this is, and what they tell one another.

Without an initialised process group there is one rank, and every function returns at once. If a rank fails, all ranks
hear of it in one way, :func:`all_ranks_or_none`: it raises its own error, and the others say which rank failed and why.
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
from frozencore.errors import RankError
from frozencore.words import one_line

T = TypeVar("T")
_BY_ITSELF = ContextVar("by itself", default=False)


def num_ranks() -> int:
    """The number of processes that work together; 1 without an initialised process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _BY_ITSELF.get() else 1


def own_rank() -> int:
    """The number of this process among them, from 0."""
    return dist.get_rank() if num_ranks() > 1 else 0


def spread(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """A rank for each name, such that the costs of all ranks are about equal: the largest cost is placed first."""
    load = [0] * ranks
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(ranks), key=load.__getitem__)
        load[owners[name]] += costs[name]
    return owners


@contextmanager
def by_itself() -> Iterator[None]:
    """Inside, this rank works as if there were no others: nothing is summed, shared or waited for."""
    before = _BY_ITSELF.set(True)
    try:
        yield
    finally:
        _BY_ITSELF.reset(before)


@contextmanager
def all_ranks_or_none() -> Iterator[None]:
    """Work that each rank does on its own; no rank goes on if one of them failed.

    Raises:
        RankError: Another rank failed or is gone; the rank that failed raises its own error.
        torch.OutOfMemoryError: On every rank, if some ran out of memory and none failed otherwise: all may try less.
    """
    if num_ranks() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        _refuse_failures(error)
        raise
    _refuse_failures(None)


def each_by_itself(work: Callable[[], T]) -> T:
    """The result of this rank's own work, once all ranks have finished theirs."""
    with all_ranks_or_none(), by_itself():
        return work()


def first_before_others(work: Callable[[], T]) -> T:
    """The result of this rank's own work; the first rank finishes before the others begin."""
    is_first = own_rank() == 0
    found = each_by_itself(lambda: work() if is_first else None)
    found_later = each_by_itself(lambda: None if is_first else work())
    return cast(T, found if is_first else found_later)


def from_first(work: Callable[[], T]) -> T:
    """The result of the first rank's work, a plain object, on every rank; the other ranks wait for it."""
    held: list[T | None] = [None]
    with all_ranks_or_none():
        if own_rank() == 0:
            held = [work()]
    if num_ranks() > 1:
        call_collective(partial(dist.broadcast_object_list, held))
    return cast(T, held[0])


def wait_for_all() -> None:
    """Return once every rank has called this."""
    if num_ranks() > 1:
        call_collective(dist.barrier)


def of_every_rank(own: T) -> list[T]:
    """Every rank's plain object, in the order of the ranks, on every rank."""
    if num_ranks() == 1:
        return [own]
    held = [own] * num_ranks()
    call_collective(partial(dist.all_gather_object, held, own))
    return held


def gathered(own: Mapping[str, T]) -> dict[str, T]:
    """All ranks' plain objects by name, on every rank."""
    return {name: found for theirs in of_every_rank(dict(own)) for name, found in theirs.items()}


def sum_over_ranks(total: Tensor) -> Tensor:
    """The sum of every rank's tensor, on every rank; the tensor itself if there is one rank."""
    if num_ranks() == 1:
        return total
    summed = total.to(exchange_device())
    call_collective(partial(dist.all_reduce, summed))
    return summed.to(total.device)


def largest_over_ranks(number: int) -> int:
    """The largest of every rank's numbers, on every rank."""
    return max(of_every_rank(number))


def call_collective(collective: Callable[[], object]) -> None:
    """Call one collective of torch.distributed.

    Raises:
        RankError: A rank is gone, or did not answer within the group's timeout.
    """
    try:
        collective()
    except RuntimeError as error:
        reason = one_line(error).partition(". ")[0]
        raise RankError(f"A rank died or stopped answering ({reason}). Start all ranks again.") from error


def exchange_device() -> torch.device:
    """The device on which the group's backend exchanges tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _refuse_failures(own: Exception | None) -> None:
    """Tell all ranks how this one's work ended; raise for the first other rank that failed, if this one did not.

    If this rank only ran out of memory, a failure of another kind on another rank counts more.
    """
    lacks_memory = own is not None and is_out_of_memory(own)
    endings = of_every_rank(None if own is None else (lacks_memory, one_line(own)))
    if own is not None and not lacks_memory:
        return
    failed = [(rank, ending) for rank, ending in enumerate(endings) if ending is not None]
    for rank, (_, reason) in (found for found in failed if not found[1][0]):
        raise RankError(f"Rank {rank} failed: {reason}")
    if failed and own is None:
        raise torch.OutOfMemoryError(f"Rank {failed[0][0]} ran out of memory.")
