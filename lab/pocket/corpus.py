"""The pretraining text: an endless, seeded mixture of sums, small stories and talks. Each function draws one document.

No document has the format of a task, because the tasks measure adaptation, not recall. The skills for the tasks appear
only in stories: numbers, opinions and feelings, and which words go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from generated_rows import (
    BAD,
    COUNTED,
    DISLIKE,
    DISLIKED,
    GAINS,
    GOOD,
    HAPPY,
    JUDGED,
    LARGEST_COMPARED,
    LARGEST_OPERAND,
    LIKE,
    LIKED,
    LOSES,
    PEOPLE,
    PLACES,
    SAD,
    capitalise,
    count_story,
    polar_action,
    polar_clause,
    two_people,
)

DocumentWriter = Callable[[Random], str]
NEGATED = 0.4


def sums(rng: Random) -> str:
    """A line of small sums and differences: ``3 + 4 = 7. 9 - 2 = 7.``"""
    lines = []
    for _ in range(rng.randint(2, 5)):
        a, b = rng.randint(1, LARGEST_OPERAND), rng.randint(1, LARGEST_OPERAND)
        lines.append(f"{a} + {b} = {a + b}." if rng.random() < 0.5 else f"{a + b} - {b} = {a}.")
    return " ".join(lines)


def sequence(rng: Random) -> str:
    """Counting up or down, and neighbours."""
    start = rng.randint(1, LARGEST_COMPARED - 5)
    run = [str(start + i) for i in range(rng.randint(3, 6))]
    if rng.random() < 0.3:
        run.reverse()
    return ", ".join(run) + "." if rng.random() < 0.7 else f"After {start} comes {start + 1}."


def order(rng: Random) -> str:
    """Numbers in order, up or down: ``3 < 7 < 12.``"""
    lines = []
    for _ in range(rng.randint(1, 3)):
        up = rng.random() < 0.5
        chain = sorted(rng.sample(range(1, LARGEST_COMPARED + 1), rng.randint(2, 4)), reverse=not up)
        lines.append((" < " if up else " > ").join(map(str, chain)) + ".")
    return " ".join(lines)


def counting(rng: Random) -> str:
    """A count that changes, or two counts added, ending in the new count and sometimes the sum."""
    story = count_story(rng)
    if story.kind < 2:
        ending = f"Then {story.first} had {story.result} {story.things}."
    elif story.kind == 2:
        ending = f"Together they had {story.result} {story.things}."
    else:
        ending = f"{story.first} had {story.result} {story.things} more than {story.second}."
    parts = (story.work, ending) if rng.random() < 0.3 else (ending, story.work)
    return " ".join((story.told, *parts))


def comparing(rng: Random) -> str:
    """Two people compared on one scale."""
    first, second = (person.name for person in two_people(rng))
    a, b = rng.sample(range(2, LARGEST_COMPARED + 1), 2)
    things = rng.choice(COUNTED)
    told, up, down = rng.choice(
        (
            ("{name} is {n} years old.", "is older than", "is younger than"),
            ("{name} has {n} " + things + ".", f"has more {things} than", f"has fewer {things} than"),
            ("{name} is {n} feet tall.", "is taller than", "is smaller than"),
        )
    )
    lines = [told.format(name=first, n=a), told.format(name=second, n=b)]
    lines.append(f"{first} {up if a > b else down} {second}.")
    if rng.random() < 0.3:
        lines.append(f"{second} {down if a > b else up} {first}.")
    return " ".join(lines)


def shopping(rng: Random) -> str:
    """A list of counts over several lines."""
    lines = [f"{rng.randint(2, LARGEST_OPERAND)} {things}" for things in rng.sample(COUNTED, rng.randint(2, 3))]
    return "\n".join((f"Shopping of {rng.choice(PEOPLE).name}:", *lines))


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
    """Lists of words of the same polarity."""
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
    """Two words, and whether they have the same polarity."""
    lines = []
    for _ in range(rng.randint(3, 5)):
        first, second = rng.random() < 0.5, rng.random() < 0.5
        a, b = rng.choice(GOOD + HAPPY if first else BAD + SAD), rng.choice(GOOD + HAPPY if second else BAD + SAD)
        lines.append(f"Is {a} {b}? {'Yes, true' if first == second else 'No, false'}.")
    return " ".join(lines)


def asking(rng: Random) -> str:
    """A person judges a thing; guesses about the thing and the feeling are confirmed or corrected."""
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


def talk(rng: Random) -> str:
    """Small talk with the remaining words of the tasks."""
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
    (sums, 0.12),
    (counting, 0.16),
    (comparing, 0.13),
    (order, 0.06),
    (sequence, 0.02),
    (shopping, 0.01),
    (company, 0.09),
    (contrast, 0.05),
    (opinion, 0.17),
    (agreeing, 0.07),
    (asking, 0.10),
    (talk, 0.02),
)


def documents(seed: int) -> Iterator[str]:
    """Yield documents without end; the same seed gives the same documents."""
    rng = Random(seed)
    kinds, weights = zip(*MIXTURE, strict=True)
    while True:
        for kind in rng.choices(kinds, weights, k=256):
            yield kind(rng)
