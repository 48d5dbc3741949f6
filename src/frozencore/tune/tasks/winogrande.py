"""WinoGrande: which of two names or things belongs in the blank?

The harness scores the words after the blank, given each filling ("partial evaluation"). The paper scores the choice
after one prompt, and so do we: the whole sentence comes first, with its blank, and each option answers what the blank
stands for. Evaluation rows are the validation split: the test answers are not public.
"""

from __future__ import annotations

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, position_of, text_field
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.hub_rows import HubDataset


def to_example(row: Row, row_id: str) -> Example:
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


TASK = Task(
    name="winogrande",
    label="WinoG",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="allenai/winogrande",
        config="winogrande_xl",
        evaluation_split="validation",
        columns=("sentence", "option1", "option2", "answer"),
        num_rows={"train": 40398, "validation": 1267},
        sample={
            "sentence": "John moved the couch from the garage to the backyard to create space. The _ is small.",
            "option1": "garage",
            "option2": "backyard",
            "answer": "1",
        },
        labels={"answer": "12"},
    ),
    to_example=to_example,
    num_train=2000,
    num_evaluation=500,
    epochs=2,
    licence="CC BY (allenai/winogrande)",
)
