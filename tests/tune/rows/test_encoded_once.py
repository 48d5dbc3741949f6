"""A row of a run is tokenised once, wherever it is from, and no text reaches calibration, training or scoring."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from frozencore.progress import no_progress
from frozencore.tune.run import execute
from input_files import write_rows, write_task
from small_runs import config_of

CHOOSING = {"epochs": 1, "select_checkpoint": "epoch", "too_long": "cut", "samples": 2}


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each text was given to a tokenizer."""
    texts, call = Counter[str](), PreTrainedTokenizerBase.__call__

    def counted(self: Any, text: Any, *given: Any, **options: Any) -> Any:
        texts.update([text] if isinstance(text, str) else text)
        return call(self, text, *given, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counted)
    return texts


def test_rows_with_choices_are_tokenised_once_and_scored_by_likelihood(tmp_path: Path, tokenised: Counter[str]) -> None:
    choices = [" no", " yes"]
    rows = [{"prompt": f"Is {i} odd?", "completion": choices[i % 2], "choices": choices} for i in range(40)]
    record = execute(config_of(write_rows(tmp_path / "rows.jsonl", rows), **CHOOSING), tmp_path / "run", no_progress)
    assert tokenised == tokenised | {f"Is {i} odd?{choice}": 1 for i in range(40) for choice in choices}
    assert {tokenised[text] for text in tokenised if "odd" in text} == {1}
    assert record.score is not None
    assert (record.score.chance, record.score.num_examples) == (0.5, 4)
    assert record.task is None


def test_rows_of_a_task_are_tokenised_once(tmp_path: Path, tokenised: Counter[str]) -> None:
    data = f"task:{write_task(tmp_path, num_train=20)}"
    record = execute(config_of(data, **CHOOSING, forgetting=None), tmp_path / "run", no_progress)
    asked = {text: count for text, count in tokenised.items() if "The answer is:" in text}
    assert len(asked) == record.rows.trained + record.rows.scored + 2
    assert set(asked.values()) == {1}
    assert record.task == "sums"
