"""Several processes on one run, started together by ``torchrun`` or ``accelerate launch``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from frozencore.errors import ConfigError

LONGEST_WAIT = timedelta(days=2)  # the others wait while the first scores; a dead process is noticed at once


def num_started() -> int:
    """The number of processes that were started together; 1 for a single process."""
    together = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) if together else 1


def own_number() -> int:
    """The number of this process among those that were started together, from 0."""
    return int(os.environ["RANK"]) if num_started() > 1 else 0


def is_first() -> bool:
    """Return whether this process prints and writes."""
    return own_number() == 0


def use_own_gpu() -> None:
    """Make this process's own GPU the default one, if there are GPUs; it joins no process group."""
    import torch

    if num_started() > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes into a process group inside, each on its own GPU if there are GPUs."""
    if num_started() == 1:
        yield
        return
    import torch
    from accelerate import PartialState
    from transformers.utils.logging import disable_progress_bar

    if not is_first():
        disable_progress_bar()
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        processes.destroy_process_group()


def refuse_several(what: str) -> None:
    """Refuse to run in several processes.

    Raises:
        ConfigError: Several processes were started.
    """
    if num_started() > 1:
        raise ConfigError(
            f"{what} is done by one process, but {num_started()} were started. Start it without torchrun."
        )
