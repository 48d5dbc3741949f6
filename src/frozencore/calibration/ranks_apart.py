"""Work that ranks do apart from one another, and how they hear of one that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from frozencore.calibration.shards import by_itself, gathered, num_ranks, own_rank
from frozencore.errors import TrainingError
from frozencore.words import one_line

T = TypeVar("T")


def each_by_itself(work: Callable[[], T]) -> T:
    """What a rank's own work gives, once all of them have come to the end of theirs.

    Raises:
        Exception: What the first rank's work raised, on the first.
        TrainingError: Which rank failed, and why.
    """
    if num_ranks() == 1:
        return work()
    found: list[T] = []
    failed: Exception | None = None
    try:
        with by_itself():
            found.append(work())
    except Exception as error:
        failed = error
    told = gathered({} if failed is None else {str(own_rank() + 1): one_line(failed)})
    if failed is not None and own_rank() == 0:
        raise failed
    for rank, why in told.items():
        raise TrainingError(f"Process {rank} of {num_ranks()} failed: {why}") from failed
    return found[0]


def first_before_others(work: Callable[[], T]) -> T:
    """What a rank's own work gives, which the first has done before the others begin.

    Raises:
        TrainingError: As for :func:`each_by_itself`.
    """
    is_first = own_rank() == 0
    found = each_by_itself(lambda: work() if is_first else None)
    found_later = each_by_itself(lambda: None if is_first else work())
    return cast(T, found if is_first else found_later)
