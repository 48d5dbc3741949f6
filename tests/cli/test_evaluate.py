"""``frozencore evaluate`` and ``frozencore tasks``: what a user types, sees, and gets as exit status."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.suite import find_task
from harness_tasks import export_tasks

POCKET = ["--model", str(pocket_model_path())]


def test_evaluate_shows_a_table_and_writes_every_score(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ["evaluate", *POCKET, "--task", "pocket-math,pocket-sentiment", "--num-evaluation", "10"]
    status, out, _ = command(*words, "--out", tmp_path)
    record = json.loads((tmp_path / "result.json").read_text())
    assert status == 0
    assert {score["task"] for score in record["scores"]} == {"pocket-math", "pocket-sentiment"}
    for heading in ("accuracy %", "± se", "chance", "majority", "truncated", "ties", "mean of 2 tasks"):
        assert heading in out
    assert "base: pocket-math: 10 in" in out
    assert "cut prompts" not in out


def test_a_task_of_ones_own_is_scored_by_its_file(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "rows.jsonl").write_text('{"q": "Is it?", "a": 0}\n')
    (tmp_path / "own.yaml").write_text(
        "name: own\nscoring: choice\nevaluation: rows.jsonl\nprompt: '{q}'\nchoices: [it is, it is not]\nanswer: a\n"
    )
    status, _, _ = command("evaluate", *POCKET, "--task", tmp_path / "own.yaml", "--out", tmp_path / "e")
    assert status == 0
    assert (tmp_path / "e" / "base" / "own" / "predictions.jsonl").exists()


def by_transformers(rows: list[dict[str, str]]) -> float:
    """The mean loss of the pocket model on completions that all have as many tokens."""
    model = AutoModelForCausalLM.from_pretrained(pocket_model_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    losses = []
    for row in rows:
        prompt = tokenizer(row["q"], add_special_tokens=False)["input_ids"]
        completion = [*tokenizer(row["a"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids, labels = torch.tensor([prompt + completion]), torch.tensor([[-100] * len(prompt) + completion])
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=labels).loss))
    return sum(losses) / len(losses)


def test_rows_of_ones_own_are_scored_on_runs_and_their_base(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = [{"q": f"Tom has {i} cats .", "a": " two cats"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--data", tmp_path / "rows.jsonl", "--columns", "prompt=q,completion=a"]
    few = ["--rank", "4", "--calibration-size", "8", "--epochs", "20", "--batch-size", "8", "--accumulation", "1"]
    assert command("tune", *POCKET, *own, *few, "--lr", "0.02", "--out", tmp_path / "run")[0] == 0
    words = ["evaluate", *POCKET, *own, "--adapter", tmp_path / "run", "--with-base", "--out", tmp_path / "e"]
    status, out, _ = command(*words)
    assert status == 0
    base, run = json.loads((tmp_path / "e" / "result.json").read_text())["scores"]
    assert [(score["subject"], score["task"], score["num_examples"]) for score in (base, run)] == [
        ("base", "rows.jsonl", 20), ("run", "rows.jsonl", 20),
    ]  # fmt: skip
    assert run["held_out_loss"] < base["held_out_loss"]
    assert base["held_out_loss"] == pytest.approx(by_transformers(rows), abs=1e-5)
    assert "Load model and rows: 1 in " in out
    assert "(1 task)" in out
    assert f"{tmp_path / 'run'} was trained on rows of {tmp_path / 'rows.jsonl'}" in out
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "new.jsonl")
    words[words.index(tmp_path / "rows.jsonl")] = tmp_path / "new.jsonl"
    assert "was trained on" not in command(*words[:-1], tmp_path / "e2")[1]
    (tmp_path / "run" / "result.json").write_text('["no record"]')
    status, said, err = command(*words[:-1], tmp_path / "e3")
    assert (status, err) == (0, "")
    assert "was trained on" not in said
    for scored in ("base: rows.jsonl: 20 in ", "run: rows.jsonl: 20 in "):
        assert re.search(rf"{scored}\d+\.\d s \(loss\)\n{scored}\d+\.\d s \(completions\)", out)


def test_long_completions_of_ones_own_rows_have_a_loss_and_no_accuracy(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Tom", "completion": " has two cats" * 9}) + "\n")
    status, out, _ = command("evaluate", *POCKET, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "e")
    (score,) = json.loads((tmp_path / "e" / "result.json").read_text())["scores"]
    assert (status, score["accuracy"]) == (0, None)
    assert f"{score['held_out_loss']:.3f}" in out


def test_a_failed_task_is_named_and_the_exit_status_is_one(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = ["--task", "svamp,pocket-math", "--data-root", tmp_path, "--num-evaluation", "5", "--out", tmp_path / "e"]
    status, out, _ = command("evaluate", *POCKET, *words)
    assert status == 1
    assert "svamp was not scored: Data set ChilleD/SVAMP must lie at" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "There is nothing to score"),
        (["--task", "sst3"], "Did you mean 'sst2'"),
        (
            ["--task", "pocket-math", "--dtype", "int8"],
            "--dtype must be one of auto, float32, bfloat16, float16, but 'int8' came",
        ),
        (
            ["--task", "pocket-math", "--prompt-style", "chatty"],
            "--prompt-style must be one of auto, chat, plain, but 'chatty' came",
        ),
        (
            ["--task", "pocket-math", "--num-evaluation", "0"],
            "--num-evaluation must be a whole number of at least 1, but 0 came",
        ),
        (["--task", "pocket-math", "--adapter", "nowhere"], "has no adapter_config.json"),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], reason: str, command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    status, _, err = command("evaluate", *POCKET, *words, "--out", tmp_path / "e")
    assert status == 2
    assert reason in err
    assert len(err.strip().splitlines()) == 1


def test_tasks_are_listed_and_shown_with_what_carries_loss(command) -> None:  # type: ignore[no-untyped-def]
    status, out, _ = command("tasks", "list")
    assert status == 0
    assert re.search(r"winogrande .*2000 / 500 .* choice .*allenai/winogrande, winogrande_xl", out)
    status, out, _ = command("tasks", "show", "pocket-entailment", "--row", "1")
    assert status == 0
    marked = re.findall(r"⟦(.*)⟧", out)
    assert marked[0] in (" true", " false")
    assert marked[1].endswith("<|endoftext|>")
    assert out.count("<- right") == 1
    assert "must be from 0 to" in command("tasks", "show", "pocket-math", "--row", "99999")[2]


def test_harness_tasks_stand_in_the_same_table(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("lm_eval")
    export_tasks([find_task("pocket-entailment")], tmp_path / "t", num_evaluation=6)
    words = ["--lm-eval", "frozencore_pocket-entailment", "--include-path", tmp_path / "t", "--num-evaluation", "6"]
    status, out, _ = command("evaluate", *POCKET, *words, "--task", "pocket-entailment", "--out", tmp_path / "e")
    assert status == 0
    ours, theirs = json.loads((tmp_path / "e" / "result.json").read_text())["scores"]
    assert (ours["accuracy"], ours["num_examples"]) == (theirs["accuracy"], theirs["num_examples"])
    assert "frozencore_pocket-entailment: the harness's acc,none" in out
