"""``tune --loss dpo``: from a file of preferences to a scored, sound run, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ConfigError, DataError
from frozencore.tune.methods import METHODS
from frozencore.tune.rows.own_rows import render_rows
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run.config import make_config

Command = Callable[..., tuple[int, str, str]]
ROWS = [
    {"prompt": f"Tom has {i} cats .", "chosen": f" {i} cats", "rejected": f" the show was bad {i}"} for i in range(40)
]
WORDS = ("tune", "--model", "pocket", "--rank", "4", "--calibration-size", "16", "--batch-size", "8")


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    path = tmp_path / "preferences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_run_learns_to_prefer_and_its_record_says_so(command: Command, preferences: Path, tmp_path: Path) -> None:
    words = (*WORDS, "--data", preferences, "--loss", "dpo", "--accumulation", "1", "--epochs", "2")
    status, out, err = command(*words, "--select-checkpoint", "epoch", "--out", tmp_path / "run")
    assert (status, err) == (0, "")
    assert "held-out DPO loss" in out
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["held_out_loss_before"], record["accuracy_before"]) == (pytest.approx(log(2)), 0.5)
    assert record["held_out_loss"] < 0.6
    assert record["accuracy"] > 0.9
    assert len(record["score"]["correct"]) == record["rows"]["scored"] == 4
    assert (record["config"]["loss"], record["resolved"]["recipe"]["beta"]) == ("dpo", 0.1)
    assert record["rows"]["columns"] == ["chosen", "rejected"]
    assert min(score["held_out_loss"] for score in record["selection"]["scores"]) < log(2)
    assert "held-out DPO loss" in (tmp_path / "run" / "adapter" / "README.md").read_text()


def test_a_dry_run_shows_both_answers(command: Command, preferences: Path, tmp_path: Path) -> None:
    status, out, _ = command(*WORDS, "--data", preferences, "--loss", "dpo", "--out", tmp_path / "run", "--dry-run")
    assert status == 0
    assert re.search(r"cats \.⟦ (\d+) cats<.*>⟧\nRejected: ⟦ the show was bad \1<", out)


CANNOT: dict[str, Any] = {
    "task": {"task": "sst2", "data": None},
    "packing": {"packing": True},
    "private-epsilon": {"private_epsilon": 8.0, "private_delta": 1e-5},
    "padding-free": {"padding_free": True},
    "calibration-task": {"calibration_task": "sst2"},
    "loss-on": {"loss_on": "all"},
}


@pytest.mark.parametrize("flag", CANNOT)
def test_what_dpo_cannot_do_is_one_line_that_names_it(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**{"model": "pocket", "data": "rows.jsonl", "loss": "dpo", "method": "random", **CANNOT[flag]})
    assert f"--{flag}" in str(caught.value)
    assert "dpo" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_methods_without_a_reference_are_refused_and_the_others_taken() -> None:
    def is_taken(method: str) -> bool:
        try:
            make_config(model="pocket", data="rows.jsonl", loss="dpo", method=method)
        except ConfigError as error:
            return "without its adapter" not in str(error)
        return True

    refused = {method for method in METHODS if not is_taken(method)}
    assert refused == {"pissa"}


def test_a_beta_without_dpo_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dpo-beta needs --loss dpo"):
        make_config(model="pocket", data="rows.jsonl", dpo_beta=0.2)


def test_rows_and_loss_go_together_or_are_refused_in_one_line(
    command: Command, preferences: Path, tmp_path: Path
) -> None:
    status, _, err = command(*WORDS, "--data", preferences, "--out", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "holds preferences (chosen and rejected): train on them with tune --loss dpo" in err
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    status, _, err = command(*WORDS, "--data", pairs, "--loss", "dpo", "--out", tmp_path / "run")
    assert (status, err.count("\n")) == (2, 1)
    assert "--loss dpo needs the columns prompt, chosen and rejected, but row 1" in err


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_chat_may_stand_in_the_prompt_or_in_the_answers(byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True), preferences=True)
    answers = [[{"role": "assistant", "content": text}] for text in ("Paris", "Lyon")]
    asked = turns("Capital?")
    split = {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
    joint = {"prompt": "Capital?", "chosen": asked + answers[0], "rejected": asked + answers[1]}
    plain = {"prompt": "Capital?", "chosen": " Paris", "rejected": " Lyon"}
    found = [encoder.preference_rows(render_rows([row], "rows", encoder))[0] for row in (split, joint, plain)]
    assert found[0] == found[1] == found[2]
    assert encoder.tokenizer.decode(found[0].rejected_ids) == "Lyon</s>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "must differ, but they are the same"),
        ({"chosen": "b", "rejected": "c"}, "column 'prompt' must hold text"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "column 'rejected' must hold text"),
        ({"prompt": "a", "chosen": "b"}, "column 'rejected' must hold text, but holds nothing"),
        ({"prompt": "a"}, "column 'chosen' must hold text, but holds nothing"),
        ({"chosen": turns("a", "b"), "rejected": turns("c", "b d")}, "must differ in their last turn alone"),
        ({"chosen": turns("a", "b", "c"), "rejected": turns("a", "b", "d")}, "must end with the assistant's turn"),
    ],
)
def test_a_bad_pair_is_one_line(row: dict[str, Any], reason: str, byte_tokenizer: Callable[..., Any]) -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=True), preferences=True)
    with pytest.raises(DataError, match=reason):
        render_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}, row], "rows", encoder)
