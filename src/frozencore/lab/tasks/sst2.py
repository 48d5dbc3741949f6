"""SST-2: is a phrase from a film review negative or positive?

{"sentence": "it 's a charming and often affecting journey . ", "label": 1, "idx": 0}
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.lab.tasks.fields import label_field, text_field
from frozencore.lab.tasks.hub import HubDataset
from frozencore.lab.tasks.made_up import sentence
from frozencore.lab.tasks.task import Example, Task

CHOICES = (" negative", " positive")


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    sentence = text_field(row, "sentence", row_id)
    label = label_field(row, "label", row_id, num_labels=2)
    return Example(
        id=row_id,
        prompt=f"Review: {sentence}\nSentiment:",
        completion=CHOICES[label],
        choices=CHOICES,
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; labels take turns."""
    return {"sentence": f"{sentence(rng)} ", "label": number % 2, "idx": number}


TASK = Task(
    name="sst2",
    scoring="choice",
    source=HubDataset(
        path="nyu-mll/glue",
        config="sst2",
        train_split="train",
        evaluation_split="validation",
        columns=("sentence", "label"),
        num_rows={"train": 67349, "validation": 872},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=1,
    licence="not stated by the data's authors",
)
