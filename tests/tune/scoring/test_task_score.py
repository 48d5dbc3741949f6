"""A task's score, counted by hand from its predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from frozencore.errors import ConfigError, DataError
from frozencore.tune.rows import Example
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.scoring.score import score_task
from frozencore.tune.suite import TEXT_TASKS, find_task

CHOICES = (" no", " yes")
EXAMPLES = [Example(f"row-{i}", f"Is {i} odd?", CHOICES[i % 4 != 0], CHOICES) for i in range(12)]


def test_a_choice_score_counts_its_predictions(byte_tokenizer: Callable[..., Any], byte_model: nn.Module) -> None:
    score = score_task(byte_model, PromptEncoder(byte_tokenizer()), find_task("sst2"), EXAMPLES)
    share = sum(p.prediction == e.completion for p, e in zip(score.predictions, EXAMPLES, strict=True)) / 12
    assert [p.id for p in score.predictions] == [e.id for e in EXAMPLES]
    assert score.accuracy == pytest.approx(share)
    assert score.standard_error == pytest.approx((share * (1 - share) / 11) ** 0.5)
    assert score.chance == 0.5
    assert score.majority_class == 0.75
    assert score.num_ties == 0
    torch.nn.init.zeros_(byte_model.lm_head.weight)
    examples = [Example(f"row-{i}", "Which?", " b", (" a", " b")) for i in range(3)]
    score = score_task(byte_model, PromptEncoder(byte_tokenizer()), find_task("sst2"), examples)
    assert (score.num_ties, score.accuracy) == (3, 0.0)  # the first of equal choices counts


def test_duplicate_choices_and_cut_prompts_are_counted(
    byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    examples = [
        Example("row-0", "Which?", " a", (" a", " b")),
        Example("row-1", "Which?", " a", (" a", " a")),
        Example("row-2", "Which of these many?" * 3, " a", (" a", " b")),
    ]
    encoder = PromptEncoder(byte_tokenizer(), max_length=20, too_long="truncate")
    score = score_task(byte_model, encoder, find_task("sst2"), examples)
    assert (score.num_duplicate_choices, score.num_cut, score.num_ties) == (1, 1, 1)
    with pytest.raises(DataError, match="1 of 3 rows are longer than the limit of 20 tokens"):
        score_task(byte_model, PromptEncoder(byte_tokenizer(), max_length=20), find_task("sst2"), examples)


@pytest.mark.parametrize("choice", ["", " ", "\n\n"])
def test_an_empty_choice_is_refused(choice: str, byte_tokenizer: Callable[..., Any], byte_model: nn.Module) -> None:
    examples = [EXAMPLES[0], Example("row-empty", "Which?", " a", (" a", choice))]
    encoder = PromptEncoder(byte_tokenizer(chat=True))  # where the space before a choice goes
    with pytest.raises(DataError, match=r"Row row-empty: a completion must hold at least one token"):
        score_task(byte_model, encoder, find_task("sst2"), examples)


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("num_tokens", [19, 20, 50, 5000])
def test_a_choice_beyond_the_limit_is_refused_however_prompts_are_cut(
    num_tokens: int, adds_start: bool, byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    examples = [Example("row-long", "Which of these?", " a", (" a", "b" * (num_tokens + (not adds_start))))]
    for too_long, message in (("refuse", "1 of 1 rows are longer"), ("truncate", "leaves no room for its prompt")):
        encoder = PromptEncoder(byte_tokenizer(adds_start=adds_start), max_length=20, too_long=too_long)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=f"{message}.*20") as caught:
            score_task(byte_model, encoder, find_task("sst2"), examples)
        assert "\n" not in str(caught.value)


def test_a_generated_score_counts_truncations_and_missing_answers(
    byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    examples = [Example(f"row-{i}", "How many?", f" The answer is: {i}") for i in range(3)]
    score = score_task(byte_model, PromptEncoder(byte_tokenizer()), find_task("svamp"), examples)
    assert (score.accuracy, score.num_unanswered) == (0.0, 3)
    assert score.num_truncated <= 3
    assert score.chance is None


def test_without_rows_or_answers_there_is_no_score(byte_tokenizer: Callable[..., Any], byte_model: nn.Module) -> None:
    encoder = PromptEncoder(byte_tokenizer())
    with pytest.raises(DataError, match="no rows to score"):
        score_task(byte_model, encoder, find_task("sst2"), [])
    with pytest.raises(ConfigError, match="'sst2-text' is plain text and has no answers to score; `tune` gives its"):
        score_task(byte_model, encoder, TEXT_TASKS["sst2-text"], [Example("a", "", "A text.")])
