"""Scores of a task and of own rows counted by hand, and the held-out loss against a sum in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures import few
from frozencore.errors import DataError, ModelError
from frozencore.progress import no_progress
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.load import load_model
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import TaskScore
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row, TokenRow
from frozencore.tune.rows.sources import Scoring
from frozencore.tune.rows.token_batches import LOGITS_BUDGET, score_in_groups
from frozencore.tune.run import execute
from frozencore.tune.run_rows import USER_ROWS
from frozencore.tune.scoring.exact_match import SHORT, are_short, complete
from frozencore.tune.scoring.score import ScoredRows, held_out_loss, losses_of_rows, score_rows
from small_runs import inputs_of
from tiny import draw_rows, tiny_all_logits, tiny_gpt2, tiny_qwen2

ROWS = draw_rows(9, seed=5)


@pytest.mark.parametrize("make_model", [tiny_qwen2, tiny_gpt2])
def test_the_loss_is_the_mean_over_completion_tokens(make_model: Callable[[], nn.Module]) -> None:
    model = make_model().train()
    reference = copy.deepcopy(model).double().eval()
    total, count = 0.0, 0
    by_row = []
    for row in ROWS:
        logprobs = reference(torch.tensor([row.input_ids])).logits[0].detach().log_softmax(-1)
        for position in range(max(1, row.num_context), len(row.input_ids)):
            total -= float(logprobs[position - 1, row.input_ids[position]])
            count += 1
        by_row.append((total - sum(nats for nats, _ in by_row), count - sum(tokens for _, tokens in by_row)))
    actual = losses_of_rows(model, ROWS, pad_id=0)
    assert actual.mean == pytest.approx(total / count, abs=1e-5)
    assert actual.nats == pytest.approx([nats for nats, _ in by_row], abs=1e-4)
    assert list(actual.tokens) == [tokens for _, tokens in by_row]
    assert model.training


def test_a_nan_in_the_model_and_rows_without_a_token_to_predict_are_refused() -> None:
    with pytest.raises(DataError, match="at least one completion token"):
        held_out_loss(tiny_qwen2(), [TokenRow("row-1", [3], 0)], pad_id=0)
    model = tiny_qwen2()
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        held_out_loss(model, ROWS, pad_id=0)


def test_a_model_that_cannot_leave_logits_out_has_the_same_loss() -> None:
    expected = held_out_loss(tiny_qwen2(), ROWS, pad_id=0)
    assert held_out_loss(tiny_all_logits(), ROWS, pad_id=0) == pytest.approx(expected, rel=1e-6)


CPU = torch.device("cpu")


def refusing(most: int, done: list[int]) -> Callable[[list[int]], None]:
    def score(rows: list[int]) -> None:
        if len(rows) > most:
            raise torch.OutOfMemoryError("injected")
        done.extend(rows)

    return score


@pytest.mark.parametrize("size", [(10, 0), (1, LOGITS_BUDGET // 64)])
@pytest.mark.parametrize("most", few([1, 3, 100], 1))
def test_every_row_is_scored_once_whatever_fits(
    size: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frozencore.tune.rows.token_batches.CPU_TOKENS", 640)
    done: list[int] = []
    steps: list[tuple[str, int, int, str]] = []
    score_in_groups(refusing(most, done), [size] * 100, CPU, progress=lambda *step: steps.append(step))
    assert sorted(done) == list(range(100))
    assert [done for _, done, _, _ in steps] == sorted(done for _, done, _, _ in steps)
    assert steps[-1][:3] == ("score", 100, 100)
    assert bool(steps[-1][3]) == (most < 64)


def test_a_row_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ModelError, match="One row of 10 tokens does not fit in the memory of cpu"):
        score_in_groups(refusing(0, []), [(10, 0)] * 3, CPU)


CHOICES = (" no", " yes")
EXAMPLES = [Row(f"row-{i}", f"Is {i} odd?", CHOICES[i % 4 != 0], CHOICES) for i in range(12)]


def score_of(model: nn.Module, encoder: PromptEncoder, scoring: Scoring, rows: Sequence[Row]) -> TaskScore:
    score = score_rows(model, encoder, ScoredRows("made", scoring, encoder.encode(rows))).task
    assert score is not None
    return score


def test_a_choice_score_counts_its_predictions(encoder: PromptEncoder, byte_model: nn.Module) -> None:
    rows = ScoredRows("made", "choice", encoder.encode(EXAMPLES))
    found = score_rows(byte_model, encoder, rows)
    right = [p.prediction == e.completion for p, e in zip(found.predictions, EXAMPLES, strict=True)]
    score, share = found.task, sum(right) / 12
    assert score is not None
    assert [p.id for p in found.predictions] == [e.id for e in EXAMPLES]
    assert score.correct == "".join("01"[one] for one in right)
    assert score.accuracy == pytest.approx(share)
    assert score.standard_error == pytest.approx((share * (1 - share) / 11) ** 0.5)
    assert score.chance == 0.5
    assert score.majority_class == 0.75
    assert score.num_ties == 0
    torch.nn.init.zeros_(byte_model.lm_head.weight)
    examples = [Row(f"row-{i}", "Which?", " b", (" a", " b")) for i in range(3)]
    score = score_of(byte_model, encoder, "choice", examples)
    assert (score.num_ties, score.accuracy) == (3, 0.0)  # the first of equal choices counts


def test_duplicate_choices_and_cut_prompts_are_counted(
    byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    examples = [
        Row("row-0", "Which?", " a", (" a", " b")),
        Row("row-1", "Which?", " a", (" a", " a")),
        Row("row-2", "Which of these many?" * 3, " a", (" a", " b")),
    ]
    encoder = PromptEncoder(byte_tokenizer(), max_length=20, too_long="cut")
    score = score_of(byte_model, encoder, "choice", examples)
    assert (score.num_duplicate_choices, score.num_cut, score.num_ties) == (1, 1, 1)
    assert score_of(byte_model, encoder, "completion", examples).num_cut == 1


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("num_tokens", [19, 5000])
def test_a_choice_beyond_the_limit_is_refused_however_prompts_are_cut(
    num_tokens: int, adds_start: bool, byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    examples = [Row("row-long", "Which of these?", " a", (" a", "b" * (num_tokens + (not adds_start))))]
    for too_long, message in (("refuse", "longer than the limit"), ("cut", "left none of 1 rows")):
        encoder = PromptEncoder(byte_tokenizer(adds_start=adds_start), max_length=20, too_long=too_long)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=message) as caught:
            score_of(byte_model, encoder, "choice", examples)
        assert "\n" not in str(caught.value)


def test_a_generated_score_counts_truncations_and_missing_answers(
    encoder: PromptEncoder, byte_model: nn.Module
) -> None:
    examples = [Row(f"row-{i}", "How many?", f" The answer is: {i}") for i in range(3)]
    score = score_of(byte_model, encoder, "exact_match", examples)
    assert (score.accuracy, score.num_unanswered) == (0.0, 3)
    assert score.num_truncated <= 3
    assert score.chance is None


REFUSED = [
    *(
        ("choice", [Row("row-1", "Which?", " a", (" a", empty))], "Row row-1: a completion must hold at least one")
        for empty in ("", " ", "\n\n")
    ),
    ("exact_match", [Row("row-1", "How many?", " 5")], "Row row-1: .* no marker"),
]


@pytest.mark.parametrize(("scoring", "rows", "reason"), REFUSED)
def test_rows_without_an_answer_to_score_are_refused(
    scoring: Scoring, rows: list[Row], reason: str, byte_tokenizer: Callable[..., Any], byte_model: nn.Module
) -> None:
    with pytest.raises(DataError, match=reason):
        score_of(byte_model, PromptEncoder(byte_tokenizer(chat=True)), scoring, rows)


def config_of(tmp_path: Path, completion: str, **options: object) -> RunConfig:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Tom has {i} cats .", "completion": completion} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_config(model=str(pocket_model_path()), data=path, rank=4, calibration_size=8, device="cpu", **options)


def test_a_prediction_is_the_greedy_continuation_and_right_if_it_reads_as_the_completion() -> None:
    model, tokenizer = load_model(str(pocket_model_path()))
    encoder = PromptEncoder(tokenizer)
    ids = tokenizer("Tom has 3 cats .")["input_ids"]
    said: list[int] = []
    while len(said) <= SHORT and (not said or said[-1] != encoder.eos_id):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + said])).logits
        said.append(int(logits[0, -1].argmax()))
    text = tokenizer.decode(said, skip_special_tokens=True)
    ended = said[-1] == encoder.eos_id
    rows = encoder.encode([Row("a", "Tom has 3 cats .", text), Row("b", "Tom has 3 cats .", " two")])
    found = score_rows(model, encoder, ScoredRows(USER_ROWS, "completion", rows))
    score = found.task
    assert score is not None
    assert [p.text.strip() for p in found.predictions] == [text.strip()] * 2
    assert [p.correct for p in found.predictions] == [ended, False]
    assert (score.majority_class, score.num_truncated) == (None, 0 if ended else 2)


def test_short_is_sixteen_tokens_and_an_end() -> None:
    row = TokenRow("a", [1] * (5 + SHORT + 1), 5)
    assert are_short([row])
    assert not are_short([row, TokenRow("b", [1] * (5 + SHORT + 2), 5)])


def test_texts_are_continued_from_their_first_half() -> None:
    model, tokenizer = load_model(str(pocket_model_path()))
    encoder = PromptEncoder(tokenizer)
    (row,) = encoder.encode([Row("a", completion="Tom has 3 cats . Tom has 4 cats .")])
    ((said,), _) = complete(model, encoder, [row], max_new_tokens=2)
    assert said.gold == tokenizer.decode(row.input_ids[len(row.input_ids) // 2 : -1]).strip()


@pytest.mark.parametrize(
    ("completion", "asked", "matches"),
    [(" two", "auto", True), (" two" * 20, "auto", False), (" two" * 20, "yes", True), (" two", "no", False)],
)
def test_exact_match_is_for_short_completions_unless_it_is_asked_for(
    tmp_path: Path, completion: str, asked: str, matches: bool
) -> None:
    rows = inputs_of(config_of(tmp_path, completion, exact_match=asked)).rows.scored
    assert rows.scoring == ("completion" if matches else "text")


def test_a_run_that_learned_a_sentence_says_it_and_keeps_what_it_said(tmp_path: Path) -> None:
    asked = {"epochs": 10, "learning_rate": 1e-2, "batch_size": 8, "accumulation": 1, "method": "lora"}
    record = execute(
        config_of(tmp_path, " Jack had 10 toys.", exact_match="auto", samples=2, **asked), tmp_path / "run", no_progress
    )
    predictions = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    right = [p["text"].strip() == p["gold"] == "Jack had 10 toys." for p in predictions]
    assert [p["correct"] for p in predictions] == right
    assert (record.accuracy_before, record.accuracy) == (0.0, sum(right) / 4)
    assert any(right)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [s["id"] for s in samples] == [p["id"] for p in predictions[:2]]
    assert [s["after"] for s in samples] != [s["before"] for s in samples]
    assert all(sample["prompt"].startswith("Tom has ") for sample in samples)
    assert {sample["wanted"] for sample in samples} == {"Jack had 10 toys."}
