"""Which of two people has more, or fewer, of something.

    {"first": "Ben", "second": "Mia", "first_count": "19", "second_count": "16", "things": "toys",
     "asked": "Fewer", "winner": "Mia"}

Prompt ``Count of toys: Ben 19, Mia 16. Fewer:``, choices `` Ben`` and `` Mia``: the two names, in the order
in which they are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.lab.pocket.generated import GeneratedSource, Row
from frozencore.lab.pocket.numbers import LARGEST_COMPARED
from frozencore.lab.pocket.words import COUNTED, two_people
from frozencore.lab.tasks.task import Example, Task

PROMPT = "Count of {things}: {first} {first_count}, {second} {second_count}. {asked}:"
ASKED = ("More", "Fewer")


def draw(rng: Random, kind: int) -> Row:
    """One pair; ``kind`` says who wins (first or second) and what is asked (more or fewer)."""
    first_wins, asked = kind % 2 == 0, ASKED[kind // 2]
    first, second = (person.name for person in two_people(rng))
    low, high = sorted(rng.sample(range(1, LARGEST_COMPARED + 1), 2))
    first_is_high = first_wins == (asked == "More")
    first_count, second_count = (high, low) if first_is_high else (low, high)
    return {
        "first": first,
        "second": second,
        "first_count": str(first_count),
        "second_count": str(second_count),
        "things": rng.choice(COUNTED),
        "asked": asked,
        "winner": first if first_wins else second,
    }


def to_example(row: Mapping[str, Any], example_id: str) -> Example:
    """The pair as a prompt, the winner as one of the two names."""
    names = (row["first"], row["second"])
    if row["winner"] not in names:
        raise DataError(f"A winner is one of {names}, but row {example_id} has {row['winner']!r}. Correct the row.")
    return Example(
        id=example_id,
        prompt=PROMPT.format(
            things=row["things"],
            first=row["first"],
            first_count=row["first_count"],
            second=row["second"],
            second_count=row["second_count"],
            asked=row["asked"],
        ),
        completion=f" {row['winner']}",
        choices=tuple(f" {name}" for name in names),
    )


TASK = Task(
    name="pocket-comparison",
    scoring="choice",
    source=GeneratedSource(
        draw, num_kinds=4, text_fields=("things", "first", "first_count", "second", "second_count", "asked"), seed=103
    ),
    to_example=to_example,
    num_train=700,
    num_evaluation=200,
    epochs=3,
    licence="Apache-2.0",
    max_new_tokens=4,
)
