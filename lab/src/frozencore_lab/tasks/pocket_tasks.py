"""The pocket model's tasks: a whole experiment offline in seconds, not comparable with the paper's numbers.

- pocket-math: ``Question: Eva had 3 pears. She found 12 more. How many did Eva have then?``, `` The answer is: 15``
- pocket-sentiment: ``Review: the soup was never sweet. Sentiment:``, `` negative``
- pocket-entailment: ``Fact: Jack did not love the song. Verdict: Was the song fine?``, `` false``
- pocket-comparison: ``Count of toys: Ben 19, Mia 16. Ben against Mia:``, `` more``

The generator of their rows, and the making of the model, are in ``lab/pocket``.
"""

from __future__ import annotations

from pathlib import Path

from frozencore_lab.tasks.described import Described, FileSource
from frozencore_lab.tasks.task import Task

ROWS = Path(__file__).parent / "pocket"


def _task(name: str, num_train: int, prompt: str, answer: str, choices: tuple[str, ...] | None = None) -> Task:
    return Task(
        name=name,
        scoring="choice" if choices else "exact_match",
        source=FileSource(
            {"train": ROWS / f"{name}-train.jsonl", "evaluation": ROWS / f"{name}-evaluation.jsonl"}, name="generated"
        ),
        to_row=Described(prompt, answer, choices),
        num_train=num_train,
        num_evaluation=200,
        epochs=3,
        licence="Apache-2.0",
        max_new_tokens=4 if choices else 10,
    )


_COUNTS = "Count of {things}: {first} {first_count}, {second} {second_count}. {first} against {second}:"
POCKET_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task("pocket-math", 800, "Question: {question}", "answer"),
        _task("pocket-sentiment", 500, "Review: {review} Sentiment:", "sentiment", ("positive", "negative")),
        _task("pocket-entailment", 900, "Fact: {fact}. Verdict: Was {guess}?", "verdict", ("true", "false")),
        _task("pocket-comparison", 250, _COUNTS, "relation", ("more", "fewer")),
    )
}
