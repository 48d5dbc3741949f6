"""The rows of the pocket tasks, which a seeded generator draws: ``python lab/pocket/generated_rows.py`` writes them.

No single word determines a sentiment: a good word after a negation is a bad verdict. Neither the fact nor the guess
alone determines the answer: the guess follows if both point the same way.

The pocket model knows only words that it has read, so tasks and pretraining text use the same vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from frozencore.errors import DataError
from frozencore.tune.pocket import pocket_model_path


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


GeneratedRow = dict[str, str]
_DRAWS_PER_ROW = 200


@dataclass(frozen=True)
class RowGenerator:
    """Rows drawn once per seed, all with different text, then split in two.

    Attributes:
        draw: Makes one row of the given kind, ``0 <= kind < num_kinds``. Kinds are labels, or other classes with equal
            shares.
        text_fields: The fields of the prompt; no two rows of either split have the same.
    """

    draw: Callable[[Random, int], GeneratedRow]
    num_kinds: int
    text_fields: tuple[str, ...]
    seed: int
    num_train: int = 2000
    num_evaluation: int = 500

    def splits(self) -> tuple[list[GeneratedRow], list[GeneratedRow]]:
        """The evaluation rows and the training rows.

        Every ``num_kinds`` consecutive rows hold each kind once, so the beginning of a split is always balanced.
        """
        rng = Random(self.seed)
        total = self.num_evaluation + self.num_train
        rows: list[GeneratedRow] = []
        seen: set[tuple[str, ...]] = set()
        while len(rows) < total:
            for kind in rng.sample(range(self.num_kinds), self.num_kinds):
                row = _draw_unseen(self, rng, kind, seen)
                seen.add(_text(self, row))
                rows.append(row)
        return rows[: self.num_evaluation], rows[self.num_evaluation : total]


def _text(generator: RowGenerator, row: GeneratedRow) -> tuple[str, ...]:
    return tuple(row[field] for field in generator.text_fields)


def _draw_unseen(generator: RowGenerator, rng: Random, kind: int, seen: set[tuple[str, ...]]) -> GeneratedRow:
    for _ in range(_DRAWS_PER_ROW):
        row = generator.draw(rng, kind)
        if _text(generator, row) not in seen:
            return row
    raise DataError(
        f"A generated task needs {generator.num_train + generator.num_evaluation} different rows, but after "
        f"{len(seen)} no new one of kind {kind} came in {_DRAWS_PER_ROW} draws. Ask for fewer rows."
    )


SENTIMENTS, VERDICTS, RELATIONS = ("positive", "negative"), ("true", "false"), ("more", "fewer")


def word_problem(rng: Random, kind: int) -> GeneratedRow:
    """One problem with a sum or a difference: 0 a gain, 1 a loss, 2 a total, 3 a difference."""
    story = count_story(rng, kind)
    then = f"How many did {story.first} have then?"
    asked = (then, then, "How many did they have together?", f"How many more did {story.first} have?")
    return {"question": f"{story.told} {asked[kind]}", "answer": str(story.result)}


def review(rng: Random, kind: int) -> GeneratedRow:
    """One review, half of them negated, whose sentiment is ``SENTIMENTS[kind]``."""
    good = kind == 0
    thing = rng.choice(JUDGED)
    negated = rng.random() < 0.5
    if rng.random() < 0.5:
        verdict = polar_clause(rng, thing, good=good, negated=negated)
    else:
        verdict = polar_action(rng, rng.choice(PEOPLE).name, thing, good=good, negated=negated)
    if rng.random() < 0.5:
        verdict = f"at the {rng.choice(PLACES)} {verdict}"
    return {"review": verdict + ".", "sentiment": SENTIMENTS[kind]}


def fact_and_guess(rng: Random, kind: int) -> GeneratedRow:
    """A fact and a guess about its person or its thing; the guess's truth is ``VERDICTS[kind]``."""
    name, thing = rng.choice(PEOPLE).name, rng.choice(JUDGED)
    good, negated = rng.random() < 0.5, rng.random() < 0.3
    guessed_good = good == (kind == 0)
    fact = polar_action(rng, name, thing, good=good, negated=negated)
    if rng.random() < 0.5:
        guess = f"the {thing} {rng.choice(GOOD if guessed_good else BAD)}"
    else:
        guess = f"{name} {rng.choice(HAPPY if guessed_good else SAD)}"
    return {"fact": fact, "guess": guess, "verdict": VERDICTS[kind]}


def two_counts(rng: Random, kind: int) -> GeneratedRow:
    """One pair in which the first person has ``RELATIONS[kind]`` than the second."""
    first, second = (person.name for person in two_people(rng))
    low, high = map(str, sorted(rng.sample(range(2, LARGEST_COMPARED + 1), 2)))
    counts = (high, low) if kind == 0 else (low, high)
    row = {"things": rng.choice(COUNTED), "first": first, "first_count": counts[0]}
    return {**row, "second": second, "second_count": counts[1], "relation": RELATIONS[kind]}


GENERATORS = {
    "pocket-math": RowGenerator(word_problem, num_kinds=4, text_fields=("question",), seed=104),
    "pocket-sentiment": RowGenerator(review, num_kinds=2, text_fields=("review",), seed=101),
    "pocket-entailment": RowGenerator(fact_and_guess, num_kinds=2, text_fields=("fact", "guess"), seed=102),
    "pocket-comparison": RowGenerator(
        two_counts, num_kinds=2, text_fields=("things", "first", "first_count", "second", "second_count"), seed=103
    ),
}


def write_rows(folder: Path) -> None:
    """Write the rows of every task to files, as the wheel ships them."""
    for name, generator in GENERATORS.items():
        for split, rows in zip(("evaluation", "train"), generator.splits(), strict=True):
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / f"{name}-{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write_rows(pocket_model_path().parent / "rows")
