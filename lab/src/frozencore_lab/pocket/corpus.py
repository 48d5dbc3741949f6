"""The pretraining text: an endless, seeded mixture of small stories, sums and talks.

No document is written in the format of a task: the tasks measure adaptation, not recall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from frozencore.tune.pocket.words import DISLIKE, GAINS, LIKE, LOSES, PEOPLE
from frozencore_lab.pocket import numbers, stories

DocumentWriter = Callable[[Random], str]


def talk(rng: Random) -> str:
    """Small talk that gives the remaining words of the tasks a place in the language."""
    first, second = rng.sample(PEOPLE, 2)
    return rng.choice(
        (
            f"{first.name} asked {second.name}. How many do you have now? I do not know.",
            f"{first.name} asked a question, and {second.name} knew. The answer is in the book.",
            f"{first.name} and {second.name} read a review, a claim and a fact. The verdict is theirs.",
            "Review it again. Question it. Fact or not? Claim it. Verdict and answer come later.",
            "Count them. Which is more, which is fewer? More of the same. Fewer is better. One against many.",
            "How many do they have together? How many more? Sentiment is a word.",
            f"I {rng.choice(LIKE + DISLIKE)} it, and you {rng.choice(LIKE + DISLIKE)} it. We all do.",
            f"{first.name} {rng.choice(GAINS + LOSES)} them, {second.name} gives more of them to {first.object}.",
        )
    )


MIXTURE: tuple[tuple[DocumentWriter, float], ...] = (
    (numbers.sums, 0.12),
    (numbers.counting, 0.16),
    (numbers.comparing, 0.13),
    (numbers.order, 0.06),
    (numbers.sequence, 0.02),
    (numbers.shopping, 0.01),
    (stories.company, 0.09),
    (stories.contrast, 0.05),
    (stories.opinion, 0.17),
    (stories.agreeing, 0.07),
    (stories.asking, 0.10),
    (talk, 0.02),
)


def documents(seed: int) -> Iterator[str]:
    """Documents without end; the same seed gives the same documents."""
    rng = Random(seed)
    kinds, weights = zip(*MIXTURE, strict=True)
    while True:
        for kind in rng.choices(kinds, weights, k=256):
            yield kind(rng)
