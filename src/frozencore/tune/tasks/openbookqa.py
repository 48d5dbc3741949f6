"""OpenBookQA: elementary science questions that need a fact from the book and common sense.

{"id": "7-980", "question_stem": "The sun is responsible for",
 "choices": {"text": ["puppies learning new tricks", "children growing up and getting old", "flowers wilting in a vase",
             "plants sprouting, blooming and wilting"], "label": ["A", "B", "C", "D"]}, "answerKey": "D"}

The book's fact is not shown. Evaluation rows are the test split.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.tune.tasks.fields import keyed_options, listed_question, text_field
from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.made_up import phrases, sentence
from frozencore.tune.tasks.task import Example, Task


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    options, answer = keyed_options(row, row_id)
    return Example(
        id=row_id,
        prompt=listed_question(text_field(row, "question_stem", row_id), options),
        completion=f" {options[answer]}",
        choices=tuple(f" {option}" for option in options),
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; keys take turns."""
    labels = ["A", "B", "C", "D"]
    options = {"text": phrases(rng, len(labels)), "label": labels}
    stem = sentence(rng)[:-1]
    return {"id": f"made-up-{number}", "question_stem": stem, "choices": options, "answerKey": labels[number % 4]}


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
        num_rows={"train": 4957, "validation": 500, "test": 500},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=3,
    licence="not stated (card of allenai/openbookqa: unknown)",
)
