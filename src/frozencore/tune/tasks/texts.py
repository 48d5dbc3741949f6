"""Real texts as plain language modelling: rows of the suite's data sets without questions, choices or answers.

{"question": "Weng earns $12 an hour for babysitting. ...", "answer": "..."}  ->  the question, all of it with loss

Held-out nats per token separate methods on small models long before accuracy does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from frozencore.tune.tasks import gsm8k, hellaswag, sst2
from frozencore.tune.tasks.fields import text_field
from frozencore.tune.tasks.task import Example, Task


def _caption(row: Mapping[str, Any], row_id: str) -> str:
    """A context with its right ending."""
    example = hellaswag.to_example(row, row_id)
    return example.prompt + example.completion


def _question(row: Mapping[str, Any], row_id: str) -> str:
    return text_field(row, "question", row_id)


def _sentence(row: Mapping[str, Any], row_id: str) -> str:
    return text_field(row, "sentence", row_id)


def _as_text(task: Task, text: Callable[[Mapping[str, Any], str], str]) -> Task:
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


TEXT_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _as_text(hellaswag.TASK, _caption),
        _as_text(gsm8k.TASK, _question),
        _as_text(sst2.TASK, _sentence),
    )
}
