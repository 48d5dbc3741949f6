"""GSM8K: word problems of several steps, answered with a worked solution and a number.

{"question": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much
              did she earn?",
 "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\\nWorking 50 minutes, she earned 0.2 x 50 =
            $<<0.2*50=10>>10.\\n#### 10"}

The calculator notes between ``<<`` and ``>>`` are left out: no calculator answers them here. The completion is the
solution with its own marker, ``####``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.tasks.answers import parse_answer
from frozencore.tune.tasks.fields import text_field
from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.made_up import sentence
from frozencore.tune.tasks.task import Example, Task


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    question = text_field(row, "question", row_id)
    solution = re.sub(r"<<[^<>]*>>", "", text_field(row, "answer", row_id))
    if parse_answer(solution) is None:
        raise DataError(f"Row {row_id}: column 'answer' must end with '#### NUMBER', but ends with {solution[-40:]!r}.")
    return Example(
        id=row_id,
        prompt=f'Question: {question}\nSolve it step by step and end with "####" and the number.\nAnswer:',
        completion=f" {solution}",
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing."""
    first, second = rng.randint(2, 90), rng.randint(2, 90)
    total = first + second
    return {
        "question": f"{sentence(rng)} {first} stones came to {second} coins. How many are there together?",
        "answer": f"There are {first}+{second} = <<{first}+{second}={total}>>{total} things.\n#### {total}",
    }


TASK = Task(
    name="gsm8k",
    scoring="exact_match",
    source=HubDataset(
        path="openai/gsm8k",
        config="main",
        train_split="train",
        evaluation_split="test",
        columns=("question", "answer"),
        num_rows={"train": 7473, "test": 1319},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=1500,
    num_evaluation=300,
    epochs=2,
    licence="MIT (openai/grade-school-math)",
    max_new_tokens=256,
)
