"""The pocket tasks: what every generator promises, and answers recomputed without the generator."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from corpus import documents
from frozencore.errors import DataError
from frozencore.tune.rows.row import Row
from frozencore_lab.tasks.pocket_tasks import POCKET_TASKS
from frozencore_lab.tasks.task import Split, Task
from generated_rows import GENERATORS, RowGenerator

TASKS = list(POCKET_TASKS.values())
CHOICE_TASKS = [task for task in TASKS if task.scoring == "choice"]
FORMAT_MARKS = {
    "pocket-math": ("Question:", "The answer is:"),
    "pocket-sentiment": ("Review:", "Sentiment:"),
    "pocket-entailment": ("Fact:", "Verdict:"),
    "pocket-comparison": ("Count of",),
}
POSITIVE_WORDS = """
    good great nice lovely fine funny tasty sweet bright clever perfect pleasant superb fresh exciting wonderful
    like love enjoy praise admire liked loved enjoyed praised admired happy glad pleased positive
"""
NEGATIVE_WORDS = """
    bad awful dull boring ugly poor sour dirty weak nasty silly terrible horrible gloomy stale bland
    hate dislike regret fear blame hated disliked regretted feared blamed sad upset angry negative
"""


def examples(task: Task, split: Split) -> list[Row]:
    return [task.to_row(row, f"{split}-{i}") for i, row in enumerate(task.source.rows(split, None))]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
class TestEveryTask:
    def test_the_shipped_rows_are_the_generators(self, task: Task) -> None:
        evaluation, train = GENERATORS[task.name].splits()
        assert task.source.rows("train", None) == train
        assert task.source.rows("evaluation", None) == evaluation
        other = replace(GENERATORS[task.name], seed=1)
        assert other.splits()[1] != train

    def test_there_are_rows_enough_and_some_over_for_validation(self, task: Task) -> None:
        assert len(task.source.rows("train", None)) >= task.num_train + 200
        assert len(task.source.rows("evaluation", None)) >= task.num_evaluation

    def test_no_prompt_comes_twice_in_either_split(self, task: Task) -> None:
        prompts = [e.prompt for split in ("train", "evaluation") for e in examples(task, split)]
        assert len(set(prompts)) == len(prompts)

    def test_the_format_is_not_in_the_pretraining_text(self, task: Task) -> None:
        text = "\n".join(islice(documents(20), 30_000))
        for mark in FORMAT_MARKS[task.name]:
            assert all(mark in e.prompt + e.completion for e in examples(task, "evaluation"))
            assert mark not in text


@pytest.mark.parametrize("task", CHOICE_TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_every_position_of_the_right_choice_has_an_equal_share(task: Task, split: Split) -> None:
    for num_rows in (200, len(task.source.rows(split, None))):
        counts = Counter(e.choices.index(e.completion) for e in examples(task, split)[:num_rows])
        assert set(counts.values()) == {num_rows // 2}


def test_word_problem_answers_follow_from_their_numbers() -> None:
    for example in examples(POCKET_TASKS["pocket-math"], "train"):
        a, b = map(int, re.findall(r"\d+", example.prompt))
        subtract = re.search(r"of them|(He|She) gave|How many more", example.prompt)
        assert example.completion == f" The answer is: {a - b if subtract else a + b}"
        assert not example.choices


def verdict_is_good(text: str) -> bool:
    """Polarity of the single judging word, turned round by a negation."""
    words = re.findall(r"[a-z]+", text)
    positive, negative = set(POSITIVE_WORDS.split()), set(NEGATIVE_WORDS.split())
    polarity = [word in positive for word in words if word in positive | negative]
    assert len(polarity) == 1
    return polarity[0] != bool({"not", "never", "hardly"} & set(words))


def test_sentiments_follow_from_polarity_and_negation() -> None:
    for example in examples(POCKET_TASKS["pocket-sentiment"], "train"):
        review = example.prompt.removesuffix(" Sentiment:")
        assert example.completion == (" positive" if verdict_is_good(review) else " negative")


def test_verdicts_are_true_when_fact_and_guess_point_the_same_way() -> None:
    for example in examples(POCKET_TASKS["pocket-entailment"], "train"):
        fact, guess = example.prompt.removesuffix("?").split(". Verdict: Was ")
        assert example.completion == (" true" if verdict_is_good(fact) == verdict_is_good(guess) else " false")
        assert not {"not", "never", "hardly"} & set(guess.split())


def test_relations_follow_from_the_counts() -> None:
    for example in examples(POCKET_TASKS["pocket-comparison"], "train"):
        counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", example.prompt)}
        asked, other = counts
        assert example.prompt.endswith(f"{asked} against {other}:")
        assert example.completion == (" more" if counts[asked] > counts[other] else " fewer")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_row_with_an_impossible_answer_is_refused(task: Task) -> None:
    row = dict(task.source.rows("train", None)[0])
    answer = next(field for field in ("answer", "sentiment", "verdict", "relation") if field in row)
    with pytest.raises(DataError, match="train-0"):
        task.to_row(row | {answer: "perhaps"}, "train-0")


def test_a_generator_that_runs_out_of_texts_says_so() -> None:
    def draw(rng: Random, kind: int) -> dict[str, str]:
        return {"text": str(rng.randrange(3))}

    with pytest.raises(DataError, match="after 3"):
        RowGenerator(draw, num_kinds=1, text_fields=("text",), seed=0, num_train=5, num_evaluation=5).splits()
