"""Sentiment of one-line reviews, half of them negated.

    {"review": "the soup was never sweet.", "sentiment": "negative"}

Prompt ``Review: the soup was never sweet. Sentiment:``, choices `` positive`` and `` negative``.
No single word decides: a good word after a negation is a bad verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from frozencore.errors import DataError
from frozencore.tune.pocket.generated import GeneratedRow, GeneratedSource
from frozencore.tune.pocket.words import JUDGED, PEOPLE, PLACES, polar_action, polar_clause
from frozencore.tune.rows import Example
from frozencore.tune.tasks import Task

PROMPT = "Review: {review} Sentiment:"
LABELS = ("positive", "negative")


def draw(rng: Random, kind: int) -> GeneratedRow:
    """One review whose label is ``LABELS[kind]``."""
    good = kind == 0
    thing = rng.choice(JUDGED)
    negated = rng.random() < 0.5
    if rng.random() < 0.5:
        verdict = polar_clause(rng, thing, good=good, negated=negated)
    else:
        verdict = polar_action(rng, rng.choice(PEOPLE).name, thing, good=good, negated=negated)
    if rng.random() < 0.5:
        verdict = f"at the {rng.choice(PLACES)} {verdict}"
    return {"review": verdict + ".", "sentiment": LABELS[kind]}


def to_example(row: Mapping[str, Any], example_id: str) -> Example:
    """A review as a prompt, its sentiment as one of two completions."""
    if row["sentiment"] not in LABELS:
        raise DataError(
            f"A sentiment is one of {LABELS}, but row {example_id} has {row['sentiment']!r}. Correct the row."
        )
    return Example(
        id=example_id,
        prompt=PROMPT.format(review=row["review"]),
        completion=f" {row['sentiment']}",
        choices=tuple(f" {label}" for label in LABELS),
    )


TASK = Task(
    name="pocket-sentiment",
    scoring="choice",
    source=GeneratedSource(draw, num_kinds=2, text_fields=("review",), seed=101),
    to_example=to_example,
    num_train=500,
    num_evaluation=200,
    epochs=3,
    licence="Apache-2.0",
    max_new_tokens=4,
)
