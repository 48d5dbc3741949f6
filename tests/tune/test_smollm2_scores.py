"""``smollm2`` is the model that it says: our scorer finds the published score, in the prompts it was measured with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from frozencore.errors import ModelError
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.models import load_model
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.suite import PAPER_TASKS
from frozencore.tune.tasks.splits import evaluation_rows
from places import SHARED

pytestmark = pytest.mark.slow

# acc_norm of lm-evaluation-harness without examples, on the unquantised model, as the card of
# lldois/SmolLM2-135M-Reasoning-SLERP-Champion gives it.
PUBLISHED_ARC_CHALLENGE = 0.2773
CHANCE = 0.25


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


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared beside this checkout")
    try:
        return load_model("smollm2", device="cpu")
    except ModelError as missing:
        pytest.skip(str(missing))


def test_arc_challenge_is_the_published_score(smollm2: tuple[Any, Any]) -> None:
    _, by_length, n = accuracies(*smollm2, "arc_challenge", 1172)
    error = math.sqrt(PUBLISHED_ARC_CHALLENGE * (1 - PUBLISHED_ARC_CHALLENGE) / n)
    assert abs(by_length - PUBLISHED_ARC_CHALLENGE) < 2 * error


def test_hellaswag_is_far_above_chance(smollm2: tuple[Any, Any]) -> None:
    """The published 43.0 % is of all 10,042 rows; the 3,000 at hand are captions of videos alone, without advice."""
    _, by_length, n = accuracies(*smollm2, "hellaswag", 500)
    assert by_length > CHANCE + 3 * math.sqrt(CHANCE * (1 - CHANCE) / n)
