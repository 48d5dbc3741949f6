"""SVAMP: one-step word problems with a number for an answer.

{"ID": "chal-777", "Type": "Common-Division", "Equation": "( 290.0 / 2.0 )", "Answer": "145",
 "Body": "There are 87 oranges and 290 bananas in Philip's collection. If the bananas are organized
          into 2 groups and oranges are organized into 93 groups",
 "Question": "How big is each group of bananas?", "question_concat": <Body and Question>}
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.tasks.answers import parse_number
from frozencore.tune.tasks.fields import text_field
from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.made_up import sentence
from frozencore.tune.tasks.task import Example, Task


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    body, question = text_field(row, "Body", row_id), text_field(row, "Question", row_id)
    answer = text_field(row, "Answer", row_id)
    if parse_number(answer) is None:
        raise DataError(f"Row {row_id}: column 'Answer' must hold a number, but holds {answer!r}.")
    stop = "" if body[-1] in ".,?!;:" else "."  # four in ten bodies lack theirs
    return Example(
        id=row_id,
        prompt=f'Question: {body}{stop} {question}\nEnd with "The answer is:" and the number.\nAnswer:',
        completion=f" The answer is: {answer}",
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing."""
    first, second = rng.randint(2, 90), rng.randint(2, 90)
    body, question = f"{sentence(rng)[:-1]} with {first} stones and {second} coins", "How many are there together?"
    return {
        "ID": f"chal-{number}", "Type": "Addition", "Equation": f"( {first}.0 + {second}.0 )",
        "Answer": str(first + second), "Body": body, "Question": question, "question_concat": f"{body}. {question}",
    }  # fmt: skip


TASK = Task(
    name="svamp",
    scoring="exact_match",
    source=HubDataset(
        path="ChilleD/SVAMP",
        train_split="train",
        evaluation_split="test",
        columns=("Body", "Question", "Answer"),
        num_rows={"train": 700, "test": 300},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=700,
    num_evaluation=300,
    epochs=3,
    licence="MIT (arkilpatel/SVAMP)",
    max_new_tokens=32,
)
