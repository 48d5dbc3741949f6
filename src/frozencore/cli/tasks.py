"""``frozencore tasks``: list the tasks."""

from __future__ import annotations

from rich.table import Table

from frozencore.cli.display import console
from frozencore.tune.task_registry import TASKS
from frozencore.tune.tasks import HubDataset, Task


def tasks() -> None:
    table = Table()
    for heading in ("task", "train / evaluation rows", "epochs", "scoring", "data"):
        table.add_column(heading)
    for task in TASKS.values():
        rows, scoring = f"{task.num_train} / {task.num_evaluation}", task.scoring.replace("_", " ")
        table.add_row(task.name, rows, str(task.epochs), scoring, _place(task))
    console.print(table)


def _place(task: Task) -> str:
    """The source of a task's rows."""
    source = task.source
    if isinstance(source, HubDataset):
        return source.path + (f", {source.config}" if source.config else "")
    return source.origin.name
