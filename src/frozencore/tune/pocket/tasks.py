"""The pocket tasks: small ones in the two formats of the suite, whose rows a seeded generator draws.

- pocket-math: ``Question: Eva had 3 pears. She found 12 more. How many did Eva have then?``, `` The answer is: 15``
- pocket-sentiment: ``Review: the soup was never sweet. Sentiment:``, `` negative``
- pocket-entailment: ``Fact: Jack did not love the song. Verdict: Was the song fine?``, `` false``
- pocket-comparison: ``Count of toys: Ben 19, Mia 16. Ben against Mia:``, `` more``

No single word decides a sentiment: a good word after a negation is a bad verdict. Neither the fact nor the guess alone
decides whether the guess follows: it does if both point the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from frozencore.tune.pocket.generated import GeneratedRow, GeneratedSource
from frozencore.tune.pocket.words import (
    BAD,
    COUNTED,
    GOOD,
    HAPPY,
    JUDGED,
    LARGEST_COMPARED,
    PEOPLE,
    PLACES,
    SAD,
    count_story,
    polar_action,
    polar_clause,
    two_people,
)
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.described import Described

SENTIMENTS, VERDICTS, RELATIONS = ("positive", "negative"), ("true", "false"), ("more", "fewer")
PROBLEM = Described("Question: {question}", "answer", None)
REVIEW = Described("Review: {review} Sentiment:", "sentiment", SENTIMENTS)
GUESS = Described("Fact: {fact}. Verdict: Was {guess}?", "verdict", VERDICTS)
COUNTS = "Count of {things}: {first} {first_count}, {second} {second_count}. {first} against {second}:"
PAIR = Described(COUNTS, "relation", RELATIONS)


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


def _task(
    name: str,
    draw: Callable[[Random, int], GeneratedRow],
    example: Described,
    texts: tuple[str, ...],
    *,
    seed: int,
    num_train: int,
    num_kinds: int = 2,
) -> Task:
    """A task of generated rows.

    Args:
        texts: The columns that make up the prompt.
    """
    return Task(
        name=name,
        scoring="choice" if example.choices else "exact_match",
        source=GeneratedSource(draw, num_kinds=num_kinds, text_fields=texts, seed=seed),
        to_example=example,
        num_train=num_train,
        num_evaluation=200,
        epochs=3,
        licence="Apache-2.0",
        max_new_tokens=4 if example.choices else 10,
    )


POCKET_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task("pocket-math", word_problem, PROBLEM, ("question",), seed=104, num_train=800, num_kinds=4),
        _task("pocket-sentiment", review, REVIEW, ("review",), seed=101, num_train=500),
        _task("pocket-entailment", fact_and_guess, GUESS, ("fact", "guess"), seed=102, num_train=900),
        _task(
            "pocket-comparison", two_counts, PAIR, ("things", "first", "first_count", "second", "second_count"),
            seed=103, num_train=250,
        ),
    )
}  # fmt: skip
