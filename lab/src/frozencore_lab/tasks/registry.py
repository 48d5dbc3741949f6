"""The table of tasks by name; a user's own task is named by the path of its YAML file.

The library finds :data:`TASK_SOURCES` among the entry points: ``--data task:sst2``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from frozencore.errors import ConfigError
from frozencore.text import unknown_name
from frozencore.tune.config import RunConfig
from frozencore.tune.rows.row import RawRow, Row, text_field
from frozencore.tune.rows.sources import TASK, SourceKind
from frozencore_lab.tasks.described import read_own_task
from frozencore_lab.tasks.paper import PAPER_TASKS, hellaswag_row
from frozencore_lab.tasks.pocket_tasks import POCKET_TASKS
from frozencore_lab.tasks.task import Task


def _as_text(task: Task, text: Callable[[RawRow, str], str]) -> Task:
    """Make a task of plain text from another task's rows, with loss on all tokens.

    On small models held-out nats per token separate methods earlier than accuracy does.
    """
    return Task(
        name=f"{task.name}-text",
        scoring="text",
        source=task.source,
        to_row=lambda row, row_id: Row(row_id, completion=text(row, row_id)),
        num_train=1600,
        num_evaluation=400,
        epochs=1,
        licence=task.licence,
    )


def _caption(row: RawRow, row_id: str) -> str:
    """A context with its right ending."""
    found = hellaswag_row(row, row_id)
    return found.prompt + found.completion


TEXT_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _as_text(PAPER_TASKS["hellaswag"], _caption),
        _as_text(PAPER_TASKS["gsm8k"], lambda row, row_id: text_field(row, "question", row_id)),
        _as_text(PAPER_TASKS["sst2"], lambda row, row_id: text_field(row, "sentence", row_id)),
    )
}
TASKS: dict[str, Task] = PAPER_TASKS | TEXT_TASKS | POCKET_TASKS


def find_task(name: str) -> Task:
    """The task of this name, or of this YAML file.

    Raises:
        ConfigError: There is no such task (the message suggests the nearest name), or the YAML file is bad.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return read_own_task(Path(name))
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    return TASKS[name]


def task_of(config: RunConfig) -> str | None:
    """The name of the task that a run learns; None for files."""
    (data, *_) = config.rows.sources
    return data.removeprefix(f"{TASK}:") if data.startswith(f"{TASK}:") else None


TASK_SOURCES = SourceKind(find_task, tuple(TASKS), {"all": tuple(PAPER_TASKS)})
