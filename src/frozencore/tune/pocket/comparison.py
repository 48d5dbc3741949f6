"""Whether the first of two people has more or fewer than the second.

    {"things": "toys", "first": "Ben", "first_count": "19", "second": "Mia", "second_count": "16", "relation": "more"}

Prompt ``Count of toys: Ben 19, Mia 16. Ben against Mia:``, choices `` more`` and `` fewer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.pocket.generated import GeneratedRow, GeneratedSource
from frozencore.tune.pocket.words import COUNTED, LARGEST_COMPARED, two_people
from frozencore.tune.rows import Example
from frozencore.tune.tasks import Task

PROMPT = "Count of {things}: {first} {first_count}, {second} {second_count}. {first} against {second}:"
LABELS = ("more", "fewer")


def draw(rng: Random, kind: int) -> GeneratedRow:
    """One pair in which the first has ``LABELS[kind]`` than the second."""
    first, second = (person.name for person in two_people(rng))
    low, high = sorted(rng.sample(range(2, LARGEST_COMPARED + 1), 2))
    first_count, second_count = (high, low) if kind == 0 else (low, high)
    return {
        "things": rng.choice(COUNTED),
        "first": first,
        "first_count": str(first_count),
        "second": second,
        "second_count": str(second_count),
        "relation": LABELS[kind],
    }


def to_example(row: Mapping[str, Any], example_id: str) -> Example:
    """The pair as a prompt, the relation as one of two completions."""
    if row["relation"] not in LABELS:
        raise DataError(
            f"A relation is one of {LABELS}, but row {example_id} has {row['relation']!r}. Correct the row."
        )
    return Example(
        id=example_id,
        prompt=PROMPT.format_map(row),
        completion=f" {row['relation']}",
        choices=tuple(f" {label}" for label in LABELS),
    )


TASK = Task(
    name="pocket-comparison",
    scoring="choice",
    source=GeneratedSource(
        draw, num_kinds=2, text_fields=("things", "first", "first_count", "second", "second_count"), seed=103
    ),
    to_example=to_example,
    num_train=250,
    num_evaluation=200,
    epochs=3,
    licence="Apache-2.0",
    max_new_tokens=4,
)
