"""``frozencore tasks``: list the tasks."""

from __future__ import annotations

from frozencore.cli.display import console, table_of
from frozencore.tune.task_registry import TASKS


def tasks() -> None:
    rows = []
    for task in TASKS.values():
        origin, size = task.source.origin, f"{task.num_train} / {task.num_evaluation}"
        place = ", ".join(name for name in (origin.name, origin.configuration) if name not in ("", "default"))
        rows.append((task.name, size, str(task.epochs), task.scoring.replace("_", " "), place))
    headings = ("task", "train / evaluation rows", "epochs", "scoring", "data")
    console.print(table_of(None, headings, rows, names=("task", "scoring", "data")))
