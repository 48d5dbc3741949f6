"""Completions of one's own rows, word for word, against a generation written out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.rows import TextRow, TokenRow
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.execute import execute
from frozencore.tune.run.models import load_model
from frozencore.tune.run.prepare import PreparedRun, prepare
from frozencore.tune.scoring.exact_match import SHORT, are_short, complete
from frozencore.tune.scoring.score import score_completions


def silent(stage: str, done: int, total: int | None, note: str = "") -> None:
    pass


def few(tmp_path: Path, completion: str, **options: object) -> RunConfig:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Tom has {i} cats .", "completion": completion} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_config(model=str(pocket_model_path()), data=path, rank=4, calibration_size=8, device="cpu", **options)


def prepare_for(config: RunConfig) -> PreparedRun:
    return prepare(config, silent)


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
    rows = encoder.training_rows([TextRow("a", "Tom has 3 cats .", text), TextRow("b", "Tom has 3 cats .", " two")])
    score = score_completions(model, encoder, rows, held_out_loss=1.0)
    assert [p.text.strip() for p in score.predictions] == [text.strip()] * 2
    assert [p.correct for p in score.predictions] == [ended, False]
    assert (score.majority_class, score.num_truncated) == (None, 0 if ended else 2)


def test_short_is_sixteen_tokens_and_an_end() -> None:
    row = TokenRow("a", [1] * (5 + SHORT + 1), 5)
    assert are_short([row])
    assert not are_short([row, TokenRow("b", [1] * (5 + SHORT + 2), 5)])


def test_texts_are_continued_from_their_first_half() -> None:
    model, tokenizer = load_model(str(pocket_model_path()))
    encoder = PromptEncoder(tokenizer)
    (row,) = encoder.training_rows([TextRow("a", "", "Tom has 3 cats . Tom has 4 cats .")])
    ((said,), _) = complete(model, encoder, [row], max_new_tokens=2)
    assert said.gold == tokenizer.decode(row.input_ids[len(row.input_ids) // 2 : -1]).strip()


@pytest.mark.parametrize(
    ("completion", "asked", "matches"),
    [(" two", "auto", True), (" two" * 20, "auto", False), (" two" * 20, "yes", True), (" two", "no", False)],
)
def test_exact_match_is_for_short_completions_unless_it_is_asked_for(
    tmp_path: Path, completion: str, asked: str, matches: bool
) -> None:
    assert prepare_for(few(tmp_path, completion, exact_match=asked)).rows.exact_match is matches


def test_a_run_that_learned_a_sentence_says_it_and_keeps_what_it_said(tmp_path: Path) -> None:
    asked = {"epochs": 10, "learning_rate": 1e-2, "batch_size": 8, "accumulation": 1, "method": "lora"}
    record = execute(
        few(tmp_path, " Jack had 10 toys.", exact_match="auto", samples=2, **asked), tmp_path / "run", silent
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
