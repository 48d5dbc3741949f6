"""RTE: does one text follow from another?

{"sentence1": "No Weapons of Mass Destruction Found in Iraq Yet.",
 "sentence2": "Weapons of Mass Destruction Found in Iraq.", "label": 1, "idx": 0}

Label 0 is entailment, 1 is not. GLUE's validation split has 277 rows: all are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.lab.tasks.fields import label_field, text_field
from frozencore.lab.tasks.hub import HubDataset
from frozencore.lab.tasks.made_up import sentence
from frozencore.lab.tasks.task import Example, Task

CHOICES = (" yes", " no")


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    sentence1 = text_field(row, "sentence1", row_id)
    sentence2 = text_field(row, "sentence2", row_id)
    label = label_field(row, "label", row_id, num_labels=2)
    return Example(
        id=row_id,
        prompt=f"Text: {sentence1}\nClaim: {sentence2}\nDoes the claim follow from the text?\nAnswer:",
        completion=CHOICES[label],
        choices=CHOICES,
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; labels take turns."""
    return {"sentence1": sentence(rng), "sentence2": sentence(rng), "label": number % 2, "idx": number}


TASK = Task(
    name="rte",
    scoring="choice",
    source=HubDataset(
        path="nyu-mll/glue",
        config="rte",
        train_split="train",
        evaluation_split="validation",
        columns=("sentence1", "sentence2", "label"),
        num_rows={"train": 2490, "validation": 277},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=3,
    licence="not stated by the data's authors",
)
