"""Words for rows that a task makes up by its hub schema: for rehearsals and tests where the data set is not at hand.

They mean nothing. What they have is what code can fail on: columns, types, labels of every class, answers that parse.
"""

from __future__ import annotations

from random import Random

NOUNS = (
    "river", "teacher", "engine", "garden", "letter", "planet", "doctor", "window", "market", "forest", "singer",
    "bottle", "island", "report", "winter", "bridge", "farmer", "mirror", "ticket", "school",
)  # fmt: skip
VERBS = (
    "follows", "carries", "changes", "answers", "covers", "reaches", "opens", "holds", "meets", "leaves", "finds",
    "moves",
)  # fmt: skip
QUALITIES = (
    "old", "quiet", "green", "small", "famous", "heavy", "early", "bright", "cold", "narrow", "second", "common",
)  # fmt: skip
PLACES = ("near", "behind", "under", "after", "before", "without", "above", "around")


def phrase(rng: Random) -> str:
    """``the quiet river``."""
    return f"the {rng.choice(QUALITIES)} {rng.choice(NOUNS)}"


def phrases(rng: Random, count: int) -> list[str]:
    """So many different ones."""
    return [
        f"the {quality} {noun}"
        for quality, noun in zip(rng.sample(QUALITIES, count), rng.sample(NOUNS, count), strict=True)
    ]


def sentence(rng: Random) -> str:
    """``The quiet river follows the old bridge near the green garden.``: one of half a billion."""
    told = f"{phrase(rng)} {rng.choice(VERBS)} {phrase(rng)} {rng.choice(PLACES)} {phrase(rng)}"
    return f"{told[0].upper()}{told[1:]}."


def question(rng: Random) -> str:
    """``What follows the old bridge near the green garden?``: one of millions."""
    return f"What {rng.choice(VERBS)} {phrase(rng)} {rng.choice(PLACES)} {phrase(rng)}?"
