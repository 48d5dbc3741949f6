"""Every task by its name, and the user's own by the path of its YAML file."""

from __future__ import annotations

from pathlib import Path

from frozencore.errors import ConfigError
from frozencore.tune.pocket import POCKET_TASKS
from frozencore.tune.rows.own_task import read_own_task
from frozencore.tune.tasks import PAPER_TASKS, Task
from frozencore.tune.tasks.texts import TEXT_TASKS
from frozencore.words import unknown_name

TASKS: dict[str, Task] = PAPER_TASKS | TEXT_TASKS | POCKET_TASKS


def find_task(name: str) -> Task:
    """The task of that name, or of that YAML file.

    Raises:
        ConfigError: There is none; the message gives the nearest name and all the others. Or a bad YAML file.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return read_own_task(Path(name))
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    return TASKS[name]


def find_tasks(names: str) -> list[Task]:
    """The tasks of a comma-separated list; ``all`` is the paper's eleven.

    Raises:
        ConfigError: From :func:`find_task`, or two tasks of one name.
    """
    tasks = [
        task
        for name in (part.strip() for part in names.split(","))
        if name
        for task in (PAPER_TASKS.values() if name == "all" else [find_task(name)])
    ]
    if not tasks:
        raise ConfigError("--task names no task. Give names separated by commas, or all.")
    twice = {task.name for task in tasks if [other.name for other in tasks].count(task.name) > 1}
    if twice:
        raise ConfigError(f"--task must name each task once, but {', '.join(sorted(twice))} comes twice.")
    return tasks
