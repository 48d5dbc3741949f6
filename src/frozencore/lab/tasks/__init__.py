"""The paper's tasks, one file each; ``frozencore.lab.suite`` adds the pocket tasks and finds them by name."""

from __future__ import annotations

from frozencore.lab.tasks import sst2, svamp
from frozencore.lab.tasks.task import Example, Task

PAPER_TASKS: dict[str, Task] = {task.name: task for task in (svamp.TASK, sst2.TASK)}

__all__ = ["PAPER_TASKS", "Example", "Task"]
