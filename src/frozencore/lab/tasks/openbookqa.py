"""OpenBookQA: elementary science questions that need a fact from the book and common sense.

{"id": "7-980", "question_stem": "The sun is responsible for",
 "choices": {"text": ["puppies learning new tricks", "children growing up and getting old", "flowers wilting in a vase",
             "plants sprouting, blooming and wilting"], "label": ["A", "B", "C", "D"]}, "answerKey": "D"}

The book's fact is not shown. Evaluation rows are the test split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frozencore.lab.tasks.fields import keyed_options, listed_question, text_field
from frozencore.lab.tasks.hub import HubDataset
from frozencore.lab.tasks.task import Example, Task


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    options, answer = keyed_options(row, row_id)
    return Example(
        id=row_id,
        prompt=listed_question(text_field(row, "question_stem", row_id), options),
        completion=f" {options[answer]}",
        choices=tuple(f" {option}" for option in options),
    )


TASK = Task(
    name="openbookqa",
    scoring="choice",
    source=HubDataset(
        path="allenai/openbookqa",
        config="main",
        train_split="train",
        evaluation_split="test",
        validation_split="validation",
        columns=("question_stem", "choices", "answerKey"),
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=3,
    licence="not stated (card of allenai/openbookqa: unknown)",
)
