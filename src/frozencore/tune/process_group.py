"""The process group of a run that several processes share, and the GPU of each process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import PartialState
from transformers.utils.logging import disable_progress_bar

from frozencore.tune.processes import is_first, num_started

LONGEST_WAIT = timedelta(days=2)  # the others wait while the first scores; a dead process is noticed at once


def use_own_gpu() -> None:
    """Make this process's own GPU the default one, if there are GPUs; it joins no process group."""
    if num_started() > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the processes into a process group inside, each on its own GPU if there are GPUs.

    Args:
        device: The device of the run.
    """
    if num_started() == 1:
        yield
        return
    if not is_first():
        disable_progress_bar()
    processes = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        processes.destroy_process_group()
