"""OpenBookQA: elementary science questions that need a fact from the book and common sense.

The book's fact is not shown. The prompt is ARC's. Evaluation rows are the test split.
"""

from __future__ import annotations

from functools import partial

from frozencore.tune.tasks import Task, arc_challenge
from frozencore.tune.tasks.hub_rows import HubDataset

TASK = Task(
    name="openbookqa",
    label="OBQA",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="allenai/openbookqa",
        config="main",
        evaluation_split="test",
        validation_split="validation",
        columns=("question_stem", "choices", "answerKey"),
        num_rows={"train": 4957, "validation": 500, "test": 500},
        sample={
            "id": "7-980",
            "question_stem": "The sun is responsible for",
            "choices": {"text": ["puppies", "growing up", "flowers wilting in a vase", "plants"], "label": [*"ABCD"]},
            "answerKey": "D",
        },
        labels={"answerKey": "ABCD"},
    ),
    to_example=partial(arc_challenge.to_example, question="question_stem"),
    num_train=2000,
    num_evaluation=500,
    epochs=3,
    licence="not stated (card of allenai/openbookqa: unknown)",
)
