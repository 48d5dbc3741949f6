"""Word problems with one sum or difference and a numeric answer.

    {"question": "Eva had 3 pears. She found 12 more. How many did Eva have then?", "answer": "15"}

Prompt ``Question: Eva had 3 pears. [...] then?``, completion `` The answer is: 15``.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.pocket.generated import GeneratedRow, GeneratedSource
from frozencore.tune.pocket.words import COUNTED, GAINED, LARGEST_OPERAND, LOST, two_people
from frozencore.tune.rows import Example
from frozencore.tune.tasks import Task

PROMPT = "Question: {question}"
COMPLETION = " The answer is: {answer}"
NUM_KINDS = 4


def draw(rng: Random, kind: int) -> GeneratedRow:
    """One problem: 0 a gain, 1 a loss, 2 a total, 3 a difference."""
    person, friend = two_people(rng)
    name, other, things = person.name, friend.name, rng.choice(COUNTED)
    a, b = rng.randint(2, LARGEST_OPERAND), rng.randint(2, LARGEST_OPERAND)
    if kind == 0:
        gain = rng.choice(
            (
                f"{person.subject} {rng.choice(GAINED)} {b} more.",
                f"{other} gave {person.object} {b} {things}.",
            )
        )
        question, answer = f"{name} had {a} {things}. {gain} How many did {name} have then?", a + b
    elif kind == 1:
        loss = rng.choice(
            (
                f"{person.subject} {rng.choice(LOST)} {b} of them.",
                f"{person.subject} gave {other} {b} {things}.",
            )
        )
        question, answer = f"{name} had {a + b} {things}. {loss} How many did {name} have then?", a
    elif kind == 2:
        told = f"{name} had {a} {things}. {other} had {b} {things}."
        question, answer = f"{told} How many did they have together?", a + b
    else:
        told = f"{name} had {a + b} {things}. {other} had {b} {things}."
        question, answer = f"{told} How many more did {name} have?", a
    return {"question": question, "answer": str(answer)}


def to_example(row: Mapping[str, Any], example_id: str) -> Example:
    """The question as a prompt, the number as the end of a sentence."""
    if not row["answer"].isdecimal():
        raise DataError(f"An answer is a whole number, but row {example_id} has {row['answer']!r}. Correct the row.")
    return Example(
        id=example_id,
        prompt=PROMPT.format(question=row["question"]),
        completion=COMPLETION.format(answer=row["answer"]),
    )


TASK = Task(
    name="pocket-math",
    scoring="exact_match",
    source=GeneratedSource(draw, num_kinds=NUM_KINDS, text_fields=("question",), seed=104),
    to_example=to_example,
    num_train=800,
    num_evaluation=200,
    epochs=3,
    licence="Apache-2.0",
    max_new_tokens=10,
)
