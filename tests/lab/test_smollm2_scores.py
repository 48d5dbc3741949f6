"""``smollm2`` is the model that it says: its scores lie near the published ones, by our scorer in their prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from frozencore.errors import ModelError
from frozencore.lab.rows.prompts import PromptEncoder
from frozencore.lab.run.loading import load_model
from frozencore.lab.scoring.choice import predict_choices
from frozencore.lab.tasks import PAPER_TASKS
from frozencore.lab.tasks.splits import evaluation_rows
from frozencore.lab.tasks.task import Example
from places import SHARED

pytestmark = pytest.mark.slow

PUBLISHED = {"arc_challenge": 0.277, "hellaswag": 0.430}
NUM_ROWS = {"arc_challenge": 1172, "hellaswag": 500}


def without_options(example: Example) -> Example:
    """ARC as lm-evaluation-harness asks it: the question alone, without the list of options in the prompt."""
    question, _, _ = example.prompt.partition("\nOptions:\n")
    return replace(example, prompt=f"{question}\nAnswer:")


def accuracies(model: Any, tokenizer: Any, task: str, num_rows: int) -> tuple[float, float, int]:
    """By summed log-likelihood, by that per character (the harness's ``acc`` and ``acc_norm``), and the rows."""
    rows = evaluation_rows(PAPER_TASKS[task], SHARED / "data", num_evaluation=num_rows)
    if task == "arc_challenge":
        rows = [without_options(row) for row in rows]
    encoder = PromptEncoder(tokenizer, max_length=2048)
    found = predict_choices(model, encoder, rows)
    by_length = 0
    for row, prediction in zip(rows, found, strict=True):
        rates = [value / len(choice[1:]) for value, choice in zip(prediction.logprobs, row.choices, strict=True)]
        by_length += row.choices[rates.index(max(rates))] == row.completion
    return sum(prediction.correct for prediction in found) / len(rows), by_length / len(rows), len(rows)


@pytest.mark.parametrize("task", PUBLISHED)
def test_scores_lie_near_the_published_ones(task: str) -> None:
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared beside this checkout")
    try:
        model, tokenizer = load_model("smollm2", device="cpu")
    except ModelError as missing:
        pytest.skip(str(missing))
    _, by_length, n = accuracies(model, tokenizer, task, NUM_ROWS[task])
    published = PUBLISHED[task]
    assert abs(by_length - published) < 3 * math.sqrt(published * (1 - published) / n)
