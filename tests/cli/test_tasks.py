"""One row of a task as ``frozencore tasks show`` prints it, for every way of scoring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frozencore.cli.tasks import show_example
from frozencore.errors import ConfigError
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.tasks import Scoring, Task
from frozencore.tune.tasks.described_task import FileSource


def task_of(scoring: Scoring, folder: Path, *, split: str = "train") -> Task:
    (folder / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    made = {
        "choice": lambda row, row_id: Example(row_id, f"Is {row['n']} odd?", " yes", (" yes", " no")),
        "exact_match": lambda row, row_id: Example(row_id, f"{row['n']} + 0 =", f" The answer is: {row['n']}"),
        "text": lambda row, row_id: Example(row_id, "", f"The number {row['n']}."),
    }
    source = FileSource({split: folder / "rows.jsonl"})  # type: ignore[dict-item]
    return Task("own", scoring, source, made[scoring], 2, 2, 1, "none", max_new_tokens=17)


@pytest.fixture
def shown(byte_tokenizer: Callable[..., Any]) -> Callable[[Task, int], str]:
    encoder = PromptEncoder(byte_tokenizer())
    return lambda task, number: "\n".join(str(line) for line in show_example(task, encoder, None, number))


def test_each_way_of_scoring_marks_what_carries_loss_and_says_how_it_is_scored(
    shown: Callable[[Task, int], str], tmp_path: Path
) -> None:
    choice = shown(task_of("choice", tmp_path), 0)
    assert "Is 1 odd?⟦ yes⟧" in choice
    assert "' yes', 4 tokens  <- right" in choice
    assert "' no', 3 tokens\n" in choice + "\n"
    number = shown(task_of("exact_match", tmp_path), 1)
    assert "2 + 0 =⟦ The answer is: 2⟧" in number
    assert number.endswith("Scored by the first number after 'The answer is:' or '####', in 17 tokens")
    text = shown(task_of("text", tmp_path), 0)
    assert "⟦The number 1.⟧" in text
    assert "Tokens (0 of the prompt, 14 with loss)" in text
    assert text.endswith("Scored by held-out nats per token")


def test_a_task_without_training_rows_shows_its_evaluation_rows(
    shown: Callable[[Task, int], str], tmp_path: Path
) -> None:
    task = task_of("choice", tmp_path, split="evaluation")
    assert "own, evaluation-1: files" in shown(task, 1)
    with pytest.raises(ConfigError, match=r"from 0 to 1 in the evaluation split of 'own', got 2"):
        shown(task, 2)
