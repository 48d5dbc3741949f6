"""GSM8K: word problems of several steps, answered with a worked solution and a number.

The calculator notes between ``<<`` and ``>>`` are left out: no calculator answers them here. The completion is the
solution with its own marker, ``####``.
"""

from __future__ import annotations

import re

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, text_field
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.answers import parse_answer
from frozencore.tune.tasks.hub_rows import HubDataset


def to_example(row: Row, row_id: str) -> Example:
    question = text_field(row, "question", row_id)
    solution = re.sub(r"<<[^<>]*>>", "", text_field(row, "answer", row_id))
    if parse_answer(solution) is None:
        raise DataError(f"Row {row_id}: column 'answer' must end with '#### NUMBER', but ends with {solution[-40:]!r}.")
    return Example(
        id=row_id,
        prompt=f'Question: {question}\nSolve it step by step and end with "####" and the number.\nAnswer:',
        completion=f" {solution}",
    )


TASK = Task(
    name="gsm8k",
    label="GSM8K",
    family="math",
    scoring="exact_match",
    source=HubDataset(
        path="openai/gsm8k",
        config="main",
        evaluation_split="test",
        columns=("question", "answer"),
        num_rows={"train": 7473, "test": 1319},
        sample={
            "question": "Weng earns $12 an hour for babysitting. How much did she earn in 50 minutes?",
            "answer": "She earned 12/60 = $<<12/60=0.2>>0.2 per minute.\n0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
        },
    ),
    to_example=to_example,
    num_train=1500,
    num_evaluation=300,
    epochs=2,
    licence="MIT (openai/grade-school-math)",
    max_new_tokens=256,
)
