"""Whether a guess follows from what somebody thought of a thing.

    {"fact": "Jack did not love the song", "guess": "the song fine", "verdict": "false"}

Prompt ``Fact: Jack did not love the song. Verdict: Was the song fine?``, choices `` true`` and `` false``.
Neither the fact nor the guess decides alone: the verdict is whether both point the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.pocket.generated import GeneratedRow, GeneratedSource
from frozencore.tune.pocket.words import BAD, GOOD, HAPPY, JUDGED, PEOPLE, SAD, polar_action
from frozencore.tune.rows import Example
from frozencore.tune.tasks import Task

PROMPT = "Fact: {fact}. Verdict: Was {guess}?"
LABELS = ("true", "false")


def draw(rng: Random, kind: int) -> GeneratedRow:
    """A fact and a guess about its person or its thing; the guess's truth is ``LABELS[kind]``."""
    name, thing = rng.choice(PEOPLE).name, rng.choice(JUDGED)
    good, negated = rng.random() < 0.5, rng.random() < 0.3
    guessed_good = good == (kind == 0)
    fact = polar_action(rng, name, thing, good=good, negated=negated)
    if rng.random() < 0.5:
        guess = f"the {thing} {rng.choice(GOOD if guessed_good else BAD)}"
    else:
        guess = f"{name} {rng.choice(HAPPY if guessed_good else SAD)}"
    return {"fact": fact, "guess": guess, "verdict": LABELS[kind]}


def to_example(row: Mapping[str, Any], example_id: str) -> Example:
    """Fact and guess as a prompt, the verdict as one of two completions."""
    if row["verdict"] not in LABELS:
        raise DataError(f"A verdict is one of {LABELS}, but row {example_id} has {row['verdict']!r}. Correct the row.")
    return Example(
        id=example_id,
        prompt=PROMPT.format(fact=row["fact"], guess=row["guess"]),
        completion=f" {row['verdict']}",
        choices=tuple(f" {label}" for label in LABELS),
    )


TASK = Task(
    name="pocket-entailment",
    scoring="choice",
    source=GeneratedSource(draw, num_kinds=2, text_fields=("fact", "guess"), seed=102),
    to_example=to_example,
    num_train=900,
    num_evaluation=200,
    epochs=3,
    licence="Apache-2.0",
    max_new_tokens=4,
)
