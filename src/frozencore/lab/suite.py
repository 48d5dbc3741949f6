"""Every task by its name."""

from __future__ import annotations

from difflib import get_close_matches

from frozencore.errors import ConfigError
from frozencore.lab.pocket import POCKET_TASKS
from frozencore.lab.tasks import PAPER_TASKS, Task

TASKS: dict[str, Task] = PAPER_TASKS | POCKET_TASKS


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: There is none; the message gives the nearest name and all the others.
    """
    if name in TASKS:
        return TASKS[name]
    nearest = get_close_matches(name.lower(), TASKS, n=1)
    guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigError(f"There is no task {name!r}. {guess}Known tasks: {', '.join(TASKS)}.")
