"""Work for which there is no room: told from other errors, and cleared away so that less may be tried next."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine refused an allocation; on a CPU torch says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def fits(work: Callable[[], object]) -> bool:
    """Do the work; False if there was no room for it, and then what it held is free again."""
    try:
        work()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
    else:
        return True
    gc.collect()  # only now is the traceback gone, and with it what it kept alive
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False
