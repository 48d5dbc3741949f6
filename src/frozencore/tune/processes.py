"""Several processes on one run, started together by ``torchrun`` or ``accelerate launch``."""

from __future__ import annotations

import os

from frozencore.errors import ConfigError


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


def refuse_several(what: str) -> None:
    """Refuse to run in several processes.

    Raises:
        ConfigError: Several processes were started.
    """
    if num_started() > 1:
        raise ConfigError(
            f"{what} is done by one process, but {num_started()} were started. Start it without torchrun."
        )
