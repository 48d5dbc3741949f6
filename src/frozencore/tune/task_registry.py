"""The table of tasks by name; a user's own task is named by the path of its YAML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from frozencore.errors import ConfigError
from frozencore.text import unknown_name
from frozencore.tune.pocket import POCKET_TASKS
from frozencore.tune.rows import Example, Row, text_field
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.described_task import read_own_task
from frozencore.tune.tasks.paper import PAPER_TASKS as PAPER_TASKS
from frozencore.tune.tasks.paper import hellaswag_example


def _as_text(task: Task, text: Callable[[Row, str], str]) -> Task:
    """Make a task of plain text from another task's rows, with loss on all tokens.

    On small models held-out nats per token separate methods earlier than accuracy does.
    """
    return Task(
        name=f"{task.name}-text",
        scoring="text",
        source=task.source,
        to_example=lambda row, row_id: Example(id=row_id, prompt="", completion=text(row, row_id)),
        num_train=1600,
        num_evaluation=400,
        epochs=1,
        licence=task.licence,
    )


def _caption(row: Row, row_id: str) -> str:
    """A context with its right ending."""
    example = hellaswag_example(row, row_id)
    return example.prompt + example.completion


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


def find_tasks(names: str) -> dict[str, Task | ConfigError]:
    """The tasks of a comma-separated list by name, with the error in place of a task that cannot be found.

    ``all`` is the paper's eleven. A task that is named twice counts once.
    """
    found: dict[str, Task | ConfigError] = {}
    for name in (part.strip() for part in names.split(",") if part.strip()):
        try:
            found |= PAPER_TASKS if name == "all" else {(task := find_task(name)).name: task}
        except ConfigError as error:
            found[name] = error
    return found
