"""``smollm2`` is the model that it says: our scorer finds the published score, in the prompts it was measured with."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from frozencore.errors import ModelError
from frozencore.tune.run.models import load_model
from frozencore.tune.suite import PAPER_TASKS
from frozencore.tune.tasks.splits import evaluation_rows
from places import ROOT, SHARED

BENCHMARKS = ROOT / "benchmarks"
# acc_norm of lm-evaluation-harness without examples, on the unquantised model, as the card of
# lldois/SmolLM2-135M-Reasoning-SLERP-Champion gives it.
PUBLISHED_ARC_CHALLENGE = 0.2773
CHANCE = 0.25


def error_of(share: float, num_rows: int) -> float:
    return math.sqrt(share * (1 - share) / num_rows)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import smollm2_scores

    return smollm2_scores


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared beside this checkout")
    try:
        return load_model("smollm2", device="cpu")
    except ModelError as missing:
        pytest.skip(str(missing))


def test_the_committed_score_is_of_all_rows_and_within_two_standard_errors_of_the_published_one() -> None:
    found = json.loads((BENCHMARKS / "results" / "smollm2-scores.json").read_text(encoding="utf-8"))
    assert (found["model"], found["task"], found["num_rows"]) == ("smollm2", "arc_challenge", 1172)
    assert found["published_per_character"] == PUBLISHED_ARC_CHALLENGE
    assert abs(found["accuracy_per_character"] - PUBLISHED_ARC_CHALLENGE) < 2 * error_of(PUBLISHED_ARC_CHALLENGE, 1172)


@pytest.mark.slow
def test_arc_challenge_is_the_published_score(scores: Any, smollm2: tuple[Any, Any]) -> None:
    rows = evaluation_rows(PAPER_TASKS["arc_challenge"], SHARED / "data", num_evaluation=1172)
    _, by_length = scores.accuracies(*smollm2, [scores.without_options(row) for row in rows])
    assert abs(by_length - PUBLISHED_ARC_CHALLENGE) < 2 * error_of(PUBLISHED_ARC_CHALLENGE, len(rows))


@pytest.mark.slow
def test_hellaswag_is_far_above_chance(scores: Any, smollm2: tuple[Any, Any]) -> None:
    """The published 43.0 % is of all 10,042 rows; the 3,000 at hand are captions of videos alone, without advice."""
    rows = evaluation_rows(PAPER_TASKS["hellaswag"], SHARED / "data", num_evaluation=500)
    _, by_length = scores.accuracies(*smollm2, rows)
    assert by_length > CHANCE + 3 * error_of(CHANCE, len(rows))
