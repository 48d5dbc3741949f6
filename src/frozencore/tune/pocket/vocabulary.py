"""The vocabulary of the pocket model, shared by the pretraining text and the tasks.

The pocket model knows only words that it has read, so a task uses only words from here and from the pretraining text.
Only a task's format is new to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Person:
    """A name with its pronouns, as ``He``/``She`` at the start of a sentence and ``him``/``her`` after a verb."""

    name: str
    subject: str
    object: str


_HE = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Omar", "Ivan")
_SHE = ("Mia", "Ann", "Eva", "Zoe", "Lily", "Nora", "Kate", "Jane")
PEOPLE = tuple(
    [Person(name, "He", "him") for name in _HE] + [Person(name, "She", "her") for name in _SHE],
)

LARGEST_OPERAND = 12
LARGEST_COMPARED = 20

COUNTED = ("apples", "pears", "eggs", "coins", "books", "cards", "shells", "stones", "pens", "cakes", "cups", "toys")
PLACES = ("park", "garden", "kitchen", "school", "market", "forest", "library", "station", "farm", "shop")
JUDGED = ("film", "soup", "book", "song", "game", "cake", "show", "play", "meal", "trip", "story", "room")

GOOD = (
    "good", "great", "nice", "lovely", "fine", "funny", "tasty", "sweet", "bright", "clever", "perfect", "pleasant",
    "superb", "fresh", "exciting", "wonderful",
)  # fmt: skip
BAD = (
    "bad", "awful", "dull", "boring", "ugly", "poor", "sour", "dirty", "weak", "nasty", "silly", "terrible", "horrible",
    "gloomy", "stale", "bland",
)  # fmt: skip
LIKE = ("like", "love", "enjoy", "praise", "admire")
DISLIKE = ("hate", "dislike", "regret", "fear", "blame")
LIKED = ("liked", "loved", "enjoyed", "praised", "admired")
DISLIKED = ("hated", "disliked", "regretted", "feared", "blamed")
HAPPY = ("happy", "glad", "pleased", "positive")
SAD = ("sad", "upset", "angry", "negative")
NEGATIONS = ("was not", "was never", "was hardly")

GAINED = ("found", "bought", "got", "won")
GAINS = ("finds", "buys", "gets", "wins")
LOST = ("lost", "sold", "broke", "dropped")
LOSES = ("loses", "sells", "breaks", "drops")


def two_people(rng: Random) -> tuple[Person, Person]:
    """Two different people."""
    first, second = rng.sample(PEOPLE, 2)
    return first, second


@dataclass(frozen=True)
class CountStory:
    """A story about counts of things that change or are compared.

    Attributes:
        first, second: The names of the two people.
        work: The sum or difference to compute, ``3 + 4 = 7.``
        kind: 0 a gain, 1 a loss, 2 a total, 3 a difference.
    """

    first: str
    second: str
    things: str
    told: str
    work: str
    result: int
    kind: int


def count_story(rng: Random, kind: int | None = None) -> CountStory:
    """A story of one kind; of any kind by default."""
    person, friend = two_people(rng)
    things = rng.choice(COUNTED)
    a, b = rng.randint(2, LARGEST_OPERAND), rng.randint(2, LARGEST_OPERAND)
    kind = rng.randrange(4) if kind is None else kind
    gains = (f"{person.subject} {{}} {b} more.", f"{friend.name} gave {person.object} {b} {things}.")
    losses = (f"{person.subject} {{}} {b} of them.", f"{person.subject} gave {friend.name} {b} {things}.")
    added = kind in (0, 2)
    if kind < 2:
        verb = rng.choice(GAINED if kind == 0 else LOST)
        then = rng.choice(gains if kind == 0 else losses).format(verb)
    else:
        then = f"{friend.name} had {b} {things}."
    work = f"{a} + {b} = {a + b}." if added else f"{a + b} - {b} = {a}."
    told = f"{person.name} had {a if added else a + b} {things}. {then}"
    return CountStory(person.name, friend.name, things, told, work, a + b if added else a, kind)


def polar_clause(rng: Random, thing: str, *, good: bool, negated: bool) -> str:
    """``the soup was hardly bland``: a verdict on ``thing``."""
    adjective = rng.choice(GOOD if good != negated else BAD)
    return f"the {thing} {rng.choice(NEGATIONS) if negated else 'was'} {adjective}"


def polar_action(rng: Random, subject: str, thing: str, *, good: bool, negated: bool) -> str:
    """``Tom did not enjoy the soup``: a person's verdict on ``thing``."""
    if not negated:
        return f"{subject} {rng.choice(LIKED if good else DISLIKED)} the {thing}"
    return f"{subject} {rng.choice(('did not', 'never did'))} {rng.choice(DISLIKE if good else LIKE)} the {thing}"


def capitalise(sentence: str) -> str:
    """Upper-case the first letter only."""
    return sentence[:1].upper() + sentence[1:]
