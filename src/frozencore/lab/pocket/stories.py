"""Short stories of the pretraining text: opinions and feelings, who owns what, who is where.

Every function draws one document. The skills the tasks later need are here in narrative clothes only.
"""

from __future__ import annotations

from random import Random

from frozencore.lab.pocket.words import (
    BAD,
    COLOURS,
    GOOD,
    HAPPY,
    JUDGED,
    OWNED,
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


def ownership(rng: Random) -> str:
    """Two people with coloured things in places, told once and then recalled."""
    people = two_people(rng)
    things = rng.sample(OWNED, 2)
    colours = rng.sample(COLOURS, 2)
    places = rng.sample(PLACES, 2)
    told, recalled = [], []
    for person, thing, colour, place in zip(people, things, colours, places, strict=True):
        if rng.random() < 0.5:
            told.append(f"{person.name} has a {colour} {thing}.")
            recalled += [
                f"The {thing} of {person.name} is {colour}.",
                f"{person.name} owns the {thing}.",
                f"The {colour} {thing} belongs to {person.name}.",
                f"The {thing} is {colour}.",
            ]
        else:
            told.append(f"{person.name} is in the {place}.")
            recalled += [f"In the {place} we see {person.name}.", f"We find {person.name} in the {place}."]
    rng.shuffle(told)
    return " ".join((*told, rng.choice(("So we know:", "Later:", "Remember:")), *rng.sample(recalled, 2)))


def belongings(rng: Random) -> str:
    """A list over several lines, so that colons and line breaks are no strangers."""
    person = rng.choice(PEOPLE)
    lines = [f"a {rng.choice(COLOURS)} {thing}" for thing in rng.sample(OWNED, rng.randint(2, 3))]
    return "\n".join((rng.choice((f"Things of {person.name}:", f"What {person.name} wants:")), *lines))
