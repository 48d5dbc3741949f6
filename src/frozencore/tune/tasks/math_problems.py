"""Word problems with a number for an answer: the paper's family "math"."""

from __future__ import annotations

import re

from frozencore.errors import DataError
from frozencore.tune.rows import Example, Row, text_field
from frozencore.tune.tasks import HubDataset, Task
from frozencore.tune.tasks.answers import parse_answer, parse_number


def svamp_example(row: Row, row_id: str) -> Example:
    body, question, answer = (text_field(row, column, row_id) for column in ("Body", "Question", "Answer"))
    if parse_number(answer) is None:
        raise DataError(f"Row {row_id}: column 'Answer' must hold a number, but holds {answer!r}.")
    stop = "" if body[-1] in ".,?!;:" else "."  # four in ten bodies have no stop
    return Example(
        id=row_id,
        prompt=f'Question: {body}{stop} {question}\nEnd with "The answer is:" and the number.\nAnswer:',
        completion=f" The answer is: {answer}",
    )


SVAMP = Task(
    name="svamp",
    label="SVAMP",
    family="math",
    scoring="exact_match",
    source=HubDataset(
        path="ChilleD/SVAMP",
        evaluation_split="test",
        columns=("Body", "Question", "Answer"),
        num_rows={"train": 700, "test": 300},
    ),
    to_example=svamp_example,
    num_train=700,
    num_evaluation=300,
    epochs=3,
    licence="MIT (arkilpatel/SVAMP)",
    max_new_tokens=32,
)
"""One-step word problems with a number for an answer."""


def gsm8k_example(row: Row, row_id: str) -> Example:
    question = text_field(row, "question", row_id)
    solution = re.sub(r"<<[^<>]*>>", "", text_field(row, "answer", row_id))
    if parse_answer(solution, gold=True) is None:
        raise DataError(f"Row {row_id}: column 'answer' must end with '#### NUMBER', but ends with {solution[-40:]!r}.")
    return Example(
        id=row_id,
        prompt=f'Question: {question}\nSolve it step by step and end with "####" and the number.\nAnswer:',
        completion=f" {solution}",
    )


GSM8K = Task(
    name="gsm8k",
    label="GSM8K",
    family="math",
    scoring="exact_match",
    source=HubDataset(
        path="openai/gsm8k",
        config="main",
        evaluation_split="test",
        columns=("question", "answer"),
        num_rows={"train": 7473, "test": 1319},
    ),
    to_example=gsm8k_example,
    num_train=1500,
    num_evaluation=300,
    epochs=2,
    licence="MIT (openai/grade-school-math)",
    max_new_tokens=256,
)
"""Word problems of several steps, answered with a worked solution and a number.

The calculator notes between ``<<`` and ``>>`` are left out: no calculator answers them here. The completion is the
solution with its own marker, ``####``.
"""
