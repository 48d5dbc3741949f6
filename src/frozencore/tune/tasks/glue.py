"""What GLUE's tasks of two labels have in common: the data set, its splits, and the sizes that the protocol takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from frozencore.tune.tasks.fields import label_field, text_field
from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.task import Example, Task


def glue_task(
    name: str,
    *,
    prompt: str,
    choices: tuple[str, ...],
    texts: Mapping[str, Callable[[Random], str]],
    num_rows: Mapping[str, int],
    epochs: int,
    licence: str,
) -> Task:
    """A task that chooses among the labels; GLUE's test labels are not public, so its validation split is evaluated.

    Args:
        prompt: With the columns of text in braces.
        choices: What follows the prompt, by label.
        texts: The columns of text, and how each is made up about nothing; labels then take turns.
    """

    def to_example(row: Mapping[str, Any], row_id: str) -> Example:
        filled = prompt.format_map({column: text_field(row, column, row_id) for column in texts})
        completion = choices[label_field(row, "label", row_id, num_labels=len(choices))]
        return Example(id=row_id, prompt=filled, completion=completion, choices=choices)

    def made_up(rng: Random, number: int) -> dict[str, Any]:
        told = {column: make(rng) for column, make in texts.items()}
        return {**told, "label": number % len(choices), "idx": number}

    return Task(
        name=name,
        scoring="choice",
        source=HubDataset(
            path="nyu-mll/glue",
            config=name,
            train_split="train",
            evaluation_split="validation",
            columns=(*texts, "label"),
            num_rows=num_rows,
            made_up=made_up,
        ),
        to_example=to_example,
        num_train=2000,
        num_evaluation=500,
        epochs=epochs,
        licence=licence,
    )
