"""Several processes that work on one run: those that ``torchrun`` or ``accelerate launch`` has started together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from frozencore.errors import ConfigError

LONGEST_WAIT = timedelta(days=2)  # while the first scores, the others wait; one that dies is noticed at once


def num_started() -> int:
    """How many processes were started together, of which this is one; 1 where it was started alone."""
    together = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) if together else 1


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return num_started() == 1 or os.environ["RANK"] == "0"


@contextmanager
def joined() -> Iterator[None]:
    """Inside, the processes that were started together are one process group, each on a GPU of its own if there are."""
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
    """Of what one process does alone.

    Raises:
        ConfigError: Several were started.
    """
    if num_started() > 1:
        raise ConfigError(
            f"{what} is done by one process, but {num_started()} were started. Start it without torchrun."
        )
