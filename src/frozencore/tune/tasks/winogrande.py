"""WinoGrande: which of two names or things belongs in the blank?

{"sentence": "John moved the couch from the garage to the backyard to create space. The _ is small.",
 "option1": "garage", "option2": "backyard", "answer": "1"}

The harness scores the words after the blank, given each filling ("partial evaluation"). The paper scores the choice
after one prompt, and so do we: the whole sentence comes first, with its blank, and each option answers what the blank
stands for. Evaluation rows are the validation split: the test answers are not public.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.tasks.fields import position_of, text_field
from frozencore.tune.tasks.hub import HubDataset
from frozencore.tune.tasks.made_up import phrases, sentence
from frozencore.tune.tasks.task import Example, Task


def to_example(row: Mapping[str, Any], row_id: str) -> Example:
    sentence = text_field(row, "sentence", row_id)
    if "_" not in sentence:
        raise DataError(f"Row {row_id}: column 'sentence' must hold a blank, written _, but holds {sentence!r}.")
    options = [text_field(row, column, row_id) for column in ("option1", "option2")]
    answer = position_of(row, "answer", ["1", "2"], row_id)
    return Example(
        id=row_id,
        prompt=f"Sentence: {sentence}\nWhat does the blank _ stand for, {options[0]} or {options[1]}?\nAnswer:",
        completion=f" {options[answer]}",
        choices=tuple(f" {option}" for option in options),
    )


def made_up(rng: Random, number: int) -> dict[str, Any]:
    """A row of the hub's schema about nothing; answers take turns."""
    first, second = phrases(rng, 2)
    text = f"{sentence(rng)} {sentence(rng)[:-1]} as the _ was there."
    return {"sentence": text, "option1": first, "option2": second, "answer": str(number % 2 + 1)}


TASK = Task(
    name="winogrande",
    scoring="choice",
    source=HubDataset(
        path="allenai/winogrande",
        config="winogrande_xl",
        train_split="train",
        evaluation_split="validation",
        columns=("sentence", "option1", "option2", "answer"),
        num_rows={"train": 40398, "validation": 1267},
        made_up=made_up,
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=2,
    licence="CC BY (allenai/winogrande)",
)
