"""Work without memory is told from other errors, and what it held is free before less is tried."""

from __future__ import annotations

import weakref

import pytest
import torch

from frozencore.device import fits, is_out_of_memory

NO_ROOM = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", NO_ROOM, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("has_gpu", [True, False])
def test_work_without_room_is_over_before_less_is_tried(
    error: Exception, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held[0]() is None))

    def work() -> None:
        block = torch.ones(8)
        held.append(weakref.ref(block))
        raise type(error)(*error.args)

    assert not fits(work)
    assert held[0]() is None
    assert emptied == ([True] if has_gpu else [])


def test_work_that_fits_is_done_once() -> None:
    done: list[int] = []
    assert fits(lambda: done.append(1))
    assert done == [1]


def test_another_error_of_the_work_is_raised() -> None:
    def work() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fits(work)
    assert not is_out_of_memory(caught.value)
