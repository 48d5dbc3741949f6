"""Short stories of the pretraining text: opinions, feelings, and which words go together.

Every function draws one document. The skills the tasks later need are here in narrative clothes only.
"""

from __future__ import annotations

from random import Random

from frozencore.tune.pocket.words import (
    BAD,
    DISLIKE,
    DISLIKED,
    GOOD,
    HAPPY,
    JUDGED,
    LIKE,
    LIKED,
    PEOPLE,
    PLACES,
    SAD,
    capitalise,
    polar_action,
    polar_clause,
    two_people,
)

NEGATED = 0.4


def _verdict(rng: Random, name: str, thing: str, *, good: bool) -> str:
    negated = rng.random() < NEGATED
    if rng.random() < 0.5:
        return capitalise(polar_clause(rng, thing, good=good, negated=negated))
    return polar_action(rng, name, thing, good=good, negated=negated)


def opinion(rng: Random) -> str:
    """People meet things, judge them, and feel accordingly."""
    lines = []
    for person in two_people(rng):
        good = rng.random() < 0.5
        if rng.random() < 0.1:
            lines.append(f"{person.name} came to the {rng.choice(PLACES)}.")
        where = f" at the {rng.choice(PLACES)}" if rng.random() < 0.1 else ""
        verdict = _verdict(rng, person.name, rng.choice(JUDGED), good=good)
        lines.append(
            f"{verdict}{where}. {person.name} {rng.choice(('was', 'felt'))} {rng.choice(HAPPY if good else SAD)}."
        )
    return " ".join(lines)


def company(rng: Random) -> str:
    """Words in like company: the polarity of a word is whom it stands with."""
    groups = []
    for _ in range(rng.randint(1, 3)):
        words = GOOD + HAPPY + LIKE + LIKED if rng.random() < 0.5 else BAD + SAD + DISLIKE + DISLIKED
        groups.append(", ".join(rng.sample(words, rng.randint(4, 7))) + ".")
    return " ".join(groups)


def contrast(rng: Random) -> str:
    """Negation in one line: what is not good is bad."""
    good = rng.random() < 0.5
    thing = rng.choice(JUDGED)
    same, other = (GOOD, BAD) if good else (BAD, GOOD)
    lines = [_verdict(rng, rng.choice(PEOPLE).name, thing, good=good)]
    lines.append(f"It was {rng.choice(same)} and {rng.choice(same)}, not {rng.choice(other)}")
    return ". ".join(lines) + "."


def agreeing(rng: Random) -> str:
    """Whether two words point the same way."""
    lines = []
    for _ in range(rng.randint(3, 5)):
        first, second = rng.random() < 0.5, rng.random() < 0.5
        a, b = rng.choice(GOOD + HAPPY if first else BAD + SAD), rng.choice(GOOD + HAPPY if second else BAD + SAD)
        lines.append(f"Is {a} {b}? {'Yes, true' if first == second else 'No, false'}.")
    return " ".join(lines)


def asking(rng: Random) -> str:
    """Somebody judges a thing; guesses about the thing and the feeling are confirmed or put right."""
    person, thing = rng.choice(PEOPLE), rng.choice(JUDGED)
    good = rng.random() < 0.5
    lines = [f"{_verdict(rng, person.name, thing, good=good)}."]
    for _ in range(rng.randint(1, 3)):
        guess = rng.random() < 0.5
        about, word = rng.choice(
            (
                (person.name, rng.choice(HAPPY if guess else SAD)),
                (f"the {thing}", rng.choice(GOOD if guess else BAD)),
            )
        )
        lines.append(f"Was {about} {word}? {'Yes, true' if guess == good else 'No, false'}.")
    return " ".join(lines)
