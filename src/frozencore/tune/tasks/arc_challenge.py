"""ARC-Challenge: science questions of a school exam with three to five options.

Some rows are labeled ``1`` to ``4``: the key is looked up among the row's own labels. Evaluation rows are the test
split. The prompt lists the options, and the answer that is scored after it is the text of an option: the paper's
accuracy of 83 is that of models that see the options; it does not print its prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, position_of, text_field, texts_field
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.hub_rows import HubDataset


def to_example(row: Row, row_id: str, question: str = "question") -> Example:
    """A question with its options, ``choices: {text, label}``, and the option that ``answerKey`` names.

    Args:
        question: The question's column.
    """
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise DataError(f"Row {row_id}: column 'choices' must hold text and label, but holds {choices!r}.")
    options, labels = (texts_field(choices, part, row_id, within="choices") for part in ("text", "label"))
    if len(options) != len(labels):
        raise DataError(f"Row {row_id}: column 'choices' has {len(options)} texts but {len(labels)} labels.")
    answer = options[position_of(row, "answerKey", labels, row_id)]
    asked = f"Question: {text_field(row, question, row_id)}"
    return Example(
        id=row_id,
        prompt="\n".join((asked, "Options:", *(f"- {option}" for option in options), "Answer:")),
        completion=f" {answer}",
        choices=tuple(f" {option}" for option in options),
    )


TASK = Task(
    name="arc_challenge",
    label="ARC-C",
    family="reasoning/QA",
    scoring="choice",
    source=HubDataset(
        path="allenai/ai2_arc",
        config="ARC-Challenge",
        evaluation_split="test",
        validation_split="validation",
        columns=("question", "choices", "answerKey"),
        num_rows={"train": 1119, "validation": 299, "test": 1172},
        sample={
            "id": "Mercury_7041615",
            "question": "Why did many plants and animals die out at the end of the Mesozoic era?",
            "choices": {"text": ["disease", "new mountains", "rise of mammals", "an asteroid"], "label": [*"ABCD"]},
            "answerKey": "D",
        },
        labels={"answerKey": "ABCD"},
    ),
    to_example=to_example,
    num_train=1119,
    num_evaluation=500,
    epochs=3,
    licence="CC BY-SA 4.0 (card of allenai/ai2_arc)",
)
