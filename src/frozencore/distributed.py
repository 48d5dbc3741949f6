"""Process groups: the number of ranks, this rank, exchanges between ranks, and what calibration reduces and compares.

Without an initialised process group there is one rank, and every function returns at once. :func:`raise_on_any_rank`
handles failures: the failed rank raises its own error, and the others raise an error that names the failed rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from frozencore.device import is_out_of_memory
from frozencore.errors import CalibrationError, RankError
from frozencore.files.fingerprint import fingerprint_tensors
from frozencore.maths.moments import LayerMoments
from frozencore.text import one_line

T = TypeVar("T")
_ENTRIES = count()
_TAG = "frozencore"
LATE_S = 10  # a rank that comes later is waited for by the first exchange


def unsharded(tensor: Tensor) -> Tensor:
    """The whole tensor; one that FSDP2 shards is gathered, for which every rank must call this."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def num_ranks() -> int:
    """The number of ranks; 1 without an initialised process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if num_ranks() > 1 else 0


def assign_owners(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each name to a rank so that costs are about equal."""
    load = [0] * ranks
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):  # the largest first
        owners[name] = min(range(ranks), key=load.__getitem__)
        load[owners[name]] += costs[name]
    return owners


@contextmanager
def raise_on_any_rank() -> Iterator[None]:
    """Run each rank's own work inside; afterwards no rank continues if one failed.

    Raises:
        RankError: Another rank failed or is gone; the failed rank raises its own error.
        torch.OutOfMemoryError: Raised on every rank if some ran out of memory and none failed otherwise.
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


def check_same_call(what: str) -> None:
    """Check that all ranks begin the same work. If another rank is late, return: the first exchange waits for it.

    The check does not use collectives, which would mix up the messages of different work.

    Args:
        what: What this rank calls, for the error.

    Raises:
        RankError: Another rank calls something else.
    """
    if num_ranks() == 1:
        return
    store, place = dist.PrefixStore("frozencore", dist.distributed_c10d._get_default_store()), next(_ENTRIES)
    keys = [f"{place}/{rank}" for rank in range(num_ranks())]
    store.set(keys[own_rank()], what)
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=LATE_S))
    for rank, key in enumerate(keys):
        if store.check([key]) and (theirs := store.get(key).decode()) != what:
            raise RankError(
                f"All ranks must call the same functions in the same order, but rank {own_rank()} called {what} and "
                f"rank {rank} called {theirs}. Call each on every rank."
            )


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Return the first rank's result, a plain object, on every rank."""
    result: list[T | None] = [None]
    with raise_on_any_rank():
        if own_rank() == 0:
            result = [work()]
    if num_ranks() > 1:
        call_collective(partial(dist.broadcast_object_list, result))
    return cast(T, result[0])


def wait_for_all() -> None:
    """Return once every rank has called this."""
    if num_ranks() > 1:
        call_collective(dist.barrier)


def all_gather(value: T) -> list[T]:
    """Return every rank's plain object, in the order of ranks, on every rank."""
    if num_ranks() == 1:
        return [value]
    gathered_objects: list[tuple[str, T]] = [(_TAG, value)] * num_ranks()
    call_collective(partial(dist.all_gather_object, gathered_objects, (_TAG, value)))
    for rank, item in enumerate(gathered_objects):
        if not isinstance(item, tuple) or item[:1] != (_TAG,):
            raise RankError(
                f"All ranks must call the same functions in the same order, but rank {rank} called another exchange of "
                "torch.distributed. Call frozencore's functions on every rank."
            )
    return [item for _, item in gathered_objects]


def gathered(named: Mapping[str, T]) -> dict[str, T]:
    """Return all ranks' plain objects by name, on every rank."""
    return {name: value for objects in all_gather(dict(named)) for name, value in objects.items()}


def sum_over_ranks(total: Tensor) -> Tensor:
    """The sum of every rank's tensor, on every rank; the tensor itself if there is one rank."""
    if num_ranks() == 1:
        return total
    summed = total.to(exchange_device())
    call_collective(partial(dist.all_reduce, summed))
    return summed.to(total.device)


def reduce_moments(moments: Mapping[str, LayerMoments], owners: Mapping[str, int]) -> dict[str, LayerMoments]:
    """Sum over all ranks. The owner gets a layer's matrices; all ranks get its count and its vectors."""
    if num_ranks() == 1:
        return dict(moments)
    reduced = {}
    for name, layer in moments.items():
        sums: dict[str, Tensor | None] = {}
        with raise_on_any_rank():  # a GPU may have no room for sums from the CPU
            totals = {moment: getattr(layer, moment).to(exchange_device()) for moment in layer.names()}
        for moment, total in totals.items():
            device = getattr(layer, moment).device
            if total.ndim == 1:
                sums[moment] = sum_over_ranks(total).to(device)
            else:
                call_collective(partial(dist.reduce, total, dst=owners[name]))
                sums[moment] = total.to(device) if owners[name] == own_rank() else None
        reduced[name] = LayerMoments(num_tokens=int(sum_over_ranks(torch.tensor(layer.num_tokens))), **sums)
    return reduced


def require_same_bases(factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Check that all ranks adapt the same layers with the same P and Q; every rank must call it.

    Raises:
        CalibrationError: A layer differs; the message names the first such layer and the rank.
    """
    if num_ranks() == 1:
        return
    every = all_gather({name: fingerprint_tensors(zip("PQ", pair, strict=True)) for name, pair in factors.items()})
    for rank, theirs in enumerate(every):
        odd = [name for name in every[0] | theirs if every[0].get(name) != theirs.get(name)]
        if odd:
            raise CalibrationError(
                f"All ranks must have the same bases, but those of layer {odd[0]!r} ({len(odd)} in all) differ between "
                f"rank {rank} and rank 0. Call calibrate on every rank, or load the same adapter on all."
            )


def call_collective(collective: Callable[[], object]) -> None:
    """Call one collective of torch.distributed.

    Raises:
        RankError: A rank is gone, or did not answer in time.
    """
    try:
        collective()
    except Exception as error:  # the bytes of another call's exchange may fail in any way
        reason = one_line(error).partition(". ")[0]
        raise RankError(f"A rank died or stopped answering ({reason}). Start all ranks again.") from error


def exchange_device() -> torch.device:
    """The device on which the group's backend exchanges tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _refuse_failures(failure: Exception | None) -> None:
    """Exchange how each rank's work ended; raise an error for the first failed rank if this one did not fail.

    If this rank only ran out of memory, another kind of failure on another rank has priority.
    """
    lacks_memory = failure is not None and is_out_of_memory(failure)
    endings = all_gather(None if failure is None else (lacks_memory, one_line(failure)))
    if failure is not None and not lacks_memory:
        return
    failed = [(rank, ending) for rank, ending in enumerate(endings) if ending is not None]
    for rank, (_, reason) in (ending for ending in failed if not ending[1][0]):
        raise RankError(f"Rank {rank} failed: {reason}")
    if failed and failure is None:
        raise torch.OutOfMemoryError(f"Rank {failed[0][0]} ran out of memory.")
