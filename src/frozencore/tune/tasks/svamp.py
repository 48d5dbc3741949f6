"""SVAMP: one-step word problems with a number for an answer."""

from __future__ import annotations

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, text_field
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.answers import parse_number
from frozencore.tune.tasks.hub_rows import HubDataset


def to_example(row: Row, row_id: str) -> Example:
    body, question, answer = (text_field(row, column, row_id) for column in ("Body", "Question", "Answer"))
    if parse_number(answer) is None:
        raise DataError(f"Row {row_id}: column 'Answer' must hold a number, but holds {answer!r}.")
    stop = "" if body[-1] in ".,?!;:" else "."  # four in ten bodies lack theirs
    return Example(
        id=row_id,
        prompt=f'Question: {body}{stop} {question}\nEnd with "The answer is:" and the number.\nAnswer:',
        completion=f" The answer is: {answer}",
    )


TASK = Task(
    name="svamp",
    label="SVAMP",
    family="math",
    scoring="exact_match",
    source=HubDataset(
        path="ChilleD/SVAMP",
        evaluation_split="test",
        columns=("Body", "Question", "Answer"),
        num_rows={"train": 700, "test": 300},
        sample={
            "ID": "chal-777",
            "Type": "Common-Division",
            "Equation": "( 290.0 / 2.0 )",
            "Answer": "145",
            "Body": "There are 87 oranges and 290 bananas in Philip's collection, which are organized into 2 groups",
            "Question": "How big is each group of bananas?",
            "question_concat": "There are 87 oranges [...]. How big is each group of bananas?",
        },
    ),
    to_example=to_example,
    num_train=700,
    num_evaluation=300,
    epochs=3,
    licence="MIT (arkilpatel/SVAMP)",
    max_new_tokens=32,
)
