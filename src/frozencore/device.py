"""torch, imported at its first use, and its devices: find one by name, get its memory, detect work that does not fit.

The command line reads every option to check flags and print help, without tensors, and importing torch takes seconds.
A module of options writes ``from frozencore.device import torch`` in place of ``import torch``; ``sys.modules`` is
unchanged.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from frozencore.errors import ConfigError

if TYPE_CHECKING:
    import torch as torch
else:

    class _AtFirstUse:
        """A module that is imported at the first use of an attribute."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module(self._name), name)
            self.__dict__[name] = found  # the next access finds it here
            return found

    torch = _AtFirstUse("torch")


def find_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: This machine has no such device, or the name is not a device name.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"There is no device {name!r} here. Use cpu, or cuda where there is a GPU.") from error


def resolve_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the first GPU, or the CPU."""
    return find_device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def to_device(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Copy a tensor to a device (None keeps it). Only a copy to the CPU waits for the values."""
    return tensor if device is None else tensor.to(device, non_blocking=device.type != "cpu")


def execution_device(module: torch.nn.Module) -> torch.device:
    """The device on which a module computes: where its weights are, or where accelerate loads offloaded ones."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        for part in module.modules():
            if (place := getattr(getattr(part, "_hf_hook", None), "execution_device", None)) is not None:
                return torch.device(place)
    return device


@contextmanager
def without_autocast() -> Iterator[None]:
    """Compute in the dtypes of the tensors inside, on every device, also where the caller uses ``torch.autocast``."""
    with torch._C._DisableAutocast():
        yield


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory; for any other device, bytes of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def computes_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device computes in this dtype itself; a CPU without it takes about eight times as long."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, name)())


NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "_ALLOC_FAILED")  # of the CPU, of a driver, of CUDA's libraries


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory, which torch often shows only in the message."""
    is_said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)
    return is_said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def run_unless_oom(work: Callable[[], object]) -> bool:
    """Do the work; return False if there was too little memory, and free the work's memory."""
    try:
        work()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
    else:
        return True
    gc.collect()  # the traceback that kept the work's tensors alive is gone here
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False
