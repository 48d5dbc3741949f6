"""CoLA: is a sentence acceptable English?

{"sentence": "The more we study verbs, the crazier they get.", "label": 1, "idx": 3}

Label 1 is acceptable. The paper reports accuracy of the choice, not the Matthews correlation of GLUE.
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
    sentence = text_field(row, "sentence", row_id)
    label = label_field(row, "label", row_id, num_labels=2)
    return Example(
        id=row_id,
        prompt=f"Sentence: {sentence}\nIs this sentence acceptable English?\nAnswer:",
        completion=CHOICES[label],
        choices=CHOICES,
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; labels take turns."""
    return {"sentence": sentence(rng), "label": number % 2, "idx": number}


TASK = Task(
    name="cola",
    scoring="choice",
    source=HubDataset(
        path="nyu-mll/glue",
        config="cola",
        train_split="train",
        evaluation_split="validation",
        columns=("sentence", "label"),
        num_rows={"train": 8551, "validation": 1043},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=2,
    licence="excerpts of published works, for research (nyu-mll/CoLA-baselines)",
)
