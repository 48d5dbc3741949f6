"""Numbers of the pretraining text: sums, sequences, counting stories, and who has more."""

from __future__ import annotations

from random import Random

from frozencore.tune.pocket.words import (
    COUNTED,
    GAINED,
    LARGEST_COMPARED,
    LARGEST_OPERAND,
    LOST,
    PEOPLE,
    two_people,
)


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
    """Numbers in their order, up or down: ``3 < 7 < 12.``"""
    lines = []
    for _ in range(rng.randint(1, 3)):
        up = rng.random() < 0.5
        chain = sorted(rng.sample(range(1, LARGEST_COMPARED + 1), rng.randint(2, 4)), reverse=not up)
        lines.append((" < " if up else " > ").join(map(str, chain)) + ".")
    return " ".join(lines)


def counting(rng: Random) -> str:
    """A count that changes, or two counts put together, ending in the new count and sometimes its sum."""
    person, friend = two_people(rng)
    things = rng.choice(COUNTED)
    a, b = rng.randint(2, LARGEST_OPERAND), rng.randint(2, LARGEST_OPERAND)
    kind = rng.randrange(4)
    if kind == 0:
        gain = rng.choice(
            (
                f"{person.subject} {rng.choice(GAINED)} {b} more.",
                f"{friend.name} gave {person.object} {b} {things}.",
            )
        )
        told, work, result = f"{person.name} had {a} {things}. {gain}", f"{a} + {b} = {a + b}.", a + b
        ending = f"Then {person.name} had {result} {things}."
    elif kind == 1:
        loss = rng.choice(
            (
                f"{person.subject} {rng.choice(LOST)} {b} of them.",
                f"{person.subject} gave {friend.name} {b} {things}.",
            )
        )
        told, work, result = f"{person.name} had {a + b} {things}. {loss}", f"{a + b} - {b} = {a}.", a
        ending = f"Then {person.name} had {result} {things}."
    elif kind == 2:
        told, work = f"{person.name} had {a} {things}. {friend.name} had {b} {things}.", f"{a} + {b} = {a + b}."
        ending = f"Together they had {a + b} {things}."
    else:
        told = f"{person.name} had {a + b} {things}. {friend.name} had {b} {things}."
        work, ending = f"{a + b} - {b} = {a}.", f"{person.name} had {a} {things} more than {friend.name}."
    return f"{told} {work} {ending}" if rng.random() < 0.3 else f"{told} {ending} {work}"


def comparing(rng: Random) -> str:
    """Two people measured on one scale, and who comes out ahead."""
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
