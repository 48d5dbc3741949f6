"""Word problems with one sum or difference and a numeric answer.

    {"question": "Eva has 3 pears. She finds 12 more. How many pears does Eva have now?", "answer": "15"}

Prompt ``Question: Eva has 3 pears. [...] now?``, completion `` The answer is: 15``.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.lab.pocket.generated import GeneratedSource, Row
from frozencore.lab.pocket.numbers import LARGEST_OPERAND
from frozencore.lab.pocket.words import COUNTED, GAINS, LOSES, two_people
from frozencore.lab.tasks.task import Example, Task

PROMPT = "Question: {question}"
COMPLETION = " The answer is: {answer}"
NUM_KINDS = 4


def draw(rng: Random, kind: int) -> Row:
    """One problem: 0 a gain, 1 a loss, 2 a total, 3 a difference."""
    person, friend = two_people(rng)
    name, other, things = person.name, friend.name, rng.choice(COUNTED)
    a, b = rng.randint(2, LARGEST_OPERAND), rng.randint(2, LARGEST_OPERAND)
    if kind == 0:
        gain = rng.choice(
            (
                f"{person.subject} {rng.choice(GAINS)} {b} more.",
                f"{other} gives {person.object} {b} {things}.",
            )
        )
        question, answer = f"{name} has {a} {things}. {gain} How many {things} does {name} have now?", a + b
    elif kind == 1:
        loss = rng.choice(
            (
                f"{person.subject} {rng.choice(LOSES)} {b} of them.",
                f"{person.subject} gives {other} {b} {things}.",
            )
        )
        question, answer = f"{name} has {a + b} {things}. {loss} How many {things} does {name} have now?", a
    elif kind == 2:
        told = f"{name} has {a} {things} and {other} has {b} {things}."
        question, answer = f"{told} How many {things} do they have together?", a + b
    else:
        told = f"{name} has {a + b} {things} and {other} has {b} {things}."
        question, answer = f"{told} How many more {things} does {name} have?", a
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
