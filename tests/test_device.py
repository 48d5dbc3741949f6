"""A run is on its device, and work without memory is told from other errors and frees what it held."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from frozencore.device import is_out_of_memory, run_unless_oom
from frozencore.tune.training.recipe import Recipe, training_arguments

NO_ROOM = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    torch.AcceleratorError("CUDA error: out of memory"),
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

    assert not run_unless_oom(work)
    assert held[0]() is None
    assert emptied == ([True] if has_gpu else [])


def test_a_trainer_trains_on_the_device_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of two GPUs, as far as torch says; transformers takes the first."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(torch.device(device)))
    recipe = Recipe(learning_rate=1e-2, warmup=0.1)
    try:
        for name in ("cuda:1", "cuda:0", "cpu"):
            place = torch.device(name)
            model: Any = SimpleNamespace(parameters=lambda place=place: iter([SimpleNamespace(device=place)]))
            arguments = training_arguments(model, recipe, recipe, tmp_path, save_steps=8, score_steps=None)
            assert (arguments.device, Accelerator(cpu=name == "cpu").device) == (place, place)
            assert arguments.n_gpu == (name != "cpu")
            assert name == "cpu" or current[-1] == place
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_work_that_fits_is_done_once() -> None:
    done: list[int] = []
    assert run_unless_oom(lambda: done.append(1))
    assert done == [1]


def test_another_error_of_the_work_is_raised() -> None:
    def work() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        run_unless_oom(work)
    assert not is_out_of_memory(caught.value)
