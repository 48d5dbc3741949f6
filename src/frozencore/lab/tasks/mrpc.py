r"""MRPC: do two sentences of the news mean the same?

{"sentence1": "He said the foodservice pie business doesn 't fit the company 's long-term growth strategy .",
 "sentence2": "\" The foodservice pie business does not fit our long-term growth strategy .", "label": 1, "idx": 1}

Label 1 is equivalent. Evaluation rows are GLUE's validation split, 408 rows: all are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.lab.tasks.fields import label_field, text_field
from frozencore.lab.tasks.hub import HubDataset
from frozencore.lab.tasks.made_up import sentence
from frozencore.lab.tasks.task import Example, Task

CHOICES = (" no", " yes")


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    sentence1 = text_field(row, "sentence1", row_id)
    sentence2 = text_field(row, "sentence2", row_id)
    label = label_field(row, "label", row_id, num_labels=2)
    return Example(
        id=row_id,
        prompt=f"Sentence 1: {sentence1}\nSentence 2: {sentence2}\nDo both sentences mean the same?\nAnswer:",
        completion=CHOICES[label],
        choices=CHOICES,
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; labels take turns."""
    return {"sentence1": sentence(rng), "sentence2": sentence(rng), "label": number % 2, "idx": number}


TASK = Task(
    name="mrpc",
    scoring="choice",
    source=HubDataset(
        path="nyu-mll/glue",
        config="mrpc",
        train_split="train",
        evaluation_split="validation",
        columns=("sentence1", "sentence2", "label"),
        num_rows={"train": 3668, "validation": 408},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=3,
    licence="not stated (Microsoft Research Paraphrase Corpus)",
)
