"""QNLI: does a sentence of Wikipedia hold the answer to a question?

{"question": "What happens if a plant looses roots or its shoots?", "sentence": "In fact it is possible to
  grow an entire plant from a single leaf, as is the case with Saintpaulia [...]", "label": 1, "idx": 3}

Label 0 is entailment: the answer is there. Evaluation rows are GLUE's validation split; its test labels are not public.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.lab.tasks.fields import label_field, text_field
from frozencore.lab.tasks.hub import HubDataset
from frozencore.lab.tasks.made_up import question, sentence
from frozencore.lab.tasks.task import Example, Task

CHOICES = (" yes", " no")


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    question = text_field(row, "question", row_id)
    sentence = text_field(row, "sentence", row_id)
    label = label_field(row, "label", row_id, num_labels=2)
    return Example(
        id=row_id,
        prompt=f"Question: {question}\nSentence: {sentence}\nDoes the sentence answer the question?\nAnswer:",
        completion=CHOICES[label],
        choices=CHOICES,
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; labels take turns."""
    return {"question": question(rng), "sentence": sentence(rng), "label": number % 2, "idx": number}


TASK = Task(
    name="qnli",
    scoring="choice",
    source=HubDataset(
        path="nyu-mll/glue",
        config="qnli",
        train_split="train",
        evaluation_split="validation",
        columns=("question", "sentence", "label"),
        num_rows={"train": 104743, "validation": 5463},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=1,
    licence="CC BY-SA 4.0 (SQuAD, from which it was made)",
)
