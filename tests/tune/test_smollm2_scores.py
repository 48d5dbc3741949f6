"""``smollm2`` is the model that it says: our scorer finds the published score, in the prompts it was measured with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from frozencore.errors import ModelError
from frozencore.tune.load import load_model
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.choice import predict_choices
from frozencore.tune.suite import PAPER_TASKS
from frozencore.tune.tasks.splits import evaluation_rows
from places import SHARED

# acc_norm of lm-evaluation-harness without examples, on the unquantised model, as the card of
# lldois/SmolLM2-135M-Reasoning-SLERP-Champion gives it.
PUBLISHED_ARC_CHALLENGE = 0.2773
CHANCE = 0.25


def error_of(share: float, num_rows: int) -> float:
    return math.sqrt(share * (1 - share) / num_rows)


def without_options(example: Example) -> Example:
    """The row of ARC as lm-evaluation-harness asks it: the question, without the list of options in the prompt."""
    question, _, _ = example.prompt.partition("\nOptions:\n")
    return replace(example, prompt=f"{question}\nAnswer:")


def accuracy_per_character(model: Any, tokenizer: Any, rows: Sequence[Example]) -> float:
    """Accuracy by the log-likelihood of a choice over its number of characters (``acc_norm``)."""
    num_correct = 0
    predictions = predict_choices(model, PromptEncoder(tokenizer, max_length=2048), rows)
    for row, prediction in zip(rows, predictions, strict=True):
        rates = [value / len(choice[1:]) for value, choice in zip(prediction.logprobs, row.choices, strict=True)]
        num_correct += row.choices[rates.index(max(rates))] == row.completion
    return num_correct / len(rows)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared beside this checkout")
    try:
        return load_model("smollm2", device="cpu")
    except ModelError as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_arc_challenge_is_the_published_score(smollm2: tuple[Any, Any]) -> None:
    rows = evaluation_rows(PAPER_TASKS["arc_challenge"], SHARED / "data", num_evaluation=1172)
    by_length = accuracy_per_character(*smollm2, [without_options(row) for row in rows])
    assert abs(by_length - PUBLISHED_ARC_CHALLENGE) < 2 * error_of(PUBLISHED_ARC_CHALLENGE, len(rows))


@pytest.mark.slow
def test_hellaswag_is_far_above_chance(smollm2: tuple[Any, Any]) -> None:
    """The published 43.0 % is of all 10,042 rows; the 3,000 at hand are captions of videos alone, without advice."""
    rows = evaluation_rows(PAPER_TASKS["hellaswag"], SHARED / "data", num_evaluation=500)
    by_length = accuracy_per_character(*smollm2, rows)
    assert by_length > CHANCE + 3 * error_of(CHANCE, len(rows))
