"""Every task by its name."""

from __future__ import annotations

from frozencore.errors import ConfigError
from frozencore.lab.pocket import POCKET_TASKS
from frozencore.lab.tasks import PAPER_TASKS, Task
from frozencore.naming import unknown_name

TASKS: dict[str, Task] = PAPER_TASKS | POCKET_TASKS


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: There is none; the message gives the nearest name and all the others.
    """
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    return TASKS[name]
