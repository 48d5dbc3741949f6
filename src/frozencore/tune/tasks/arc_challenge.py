"""ARC-Challenge: science questions of a school exam with three to five options.

{"id": "Mercury_7041615",
 "question": "Which of these do scientists offer as the most recent explanation as to why many plants and
              animals died out at the end of the Mesozoic era?",
 "choices": {"text": ["worldwide disease", "global mountain building", "rise of mammals that preyed upon plants and
             animals", "impact of an asteroid created dust that blocked the sunlight"], "label": ["A", "B", "C", "D"]},
 "answerKey": "D"}

Some rows are labeled ``1`` to ``4``: the key is looked up among the row's own labels. Evaluation rows are the test
split.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.tune.tasks.fields import keyed_options, listed_question, text_field
from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.made_up import phrases, question
from frozencore.tune.tasks.task import Example, Task


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    options, answer = keyed_options(row, row_id)
    return Example(
        id=row_id,
        prompt=listed_question(text_field(row, "question", row_id), options),
        completion=f" {options[answer]}",
        choices=tuple(f" {option}" for option in options),
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; keys take turns, and so do letters and numbers for labels."""
    labels = ["A", "B", "C", "D"] if number % 5 else ["1", "2", "3", "4"]
    options = {"text": phrases(rng, len(labels)), "label": labels}
    return {"id": f"made-up-{number}", "question": question(rng), "choices": options, "answerKey": labels[number % 4]}


TASK = Task(
    name="arc_challenge",
    scoring="choice",
    source=HubDataset(
        path="allenai/ai2_arc",
        config="ARC-Challenge",
        train_split="train",
        evaluation_split="test",
        validation_split="validation",
        columns=("question", "choices", "answerKey"),
        num_rows={"train": 1119, "validation": 299, "test": 1172},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=1119,
    num_evaluation=500,
    epochs=3,
    licence="CC BY-SA 4.0 (card of allenai/ai2_arc)",
)
