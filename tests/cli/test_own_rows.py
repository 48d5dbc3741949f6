"""Own rows on the command line: several files, rows to evaluate on from a file, loss on every turn."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import RunRecord

WORDS = ("tune", "--model", "pocket", "--method", "random", "--rank", "4", "--epochs", "1")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(kind: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"Tom has {i} {kind} .", "completion": f" {i} {kind}"} for i in range(count)]


def test_several_files_and_a_file_to_evaluate_on_are_in_the_record(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cats, dogs = write(tmp_path / "cats.jsonl", pairs("cats", 40)), write(tmp_path / "dogs.jsonl", pairs("dogs", 8))
    held = write(tmp_path / "held.jsonl", [*pairs("cups", 5), *pairs("dogs", 2)])
    data = ["--data", cats, "--data", dogs, "--eval-data", held]
    status, out, err = command(*WORDS, *data, "--out", tmp_path / "run")
    assert (status, err) == (0, "")
    said = " ".join(out.split())
    assert f"{cats}: 40 of 40 rows; {dogs}: 8 of 8 rows. Held-out rows are those of held.jsonl." in said
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    used = record["rows"]
    assert (used["read"], used["trained"], used["scored"], used["held_out_from"]) == (48, 46, 7, "held.jsonl")
    assert used["left_out"] == {"also in --eval-data": 2}
    assert used["sources"] == [
        {"source": str(cats), "read": 40, "drawn": 40},
        {"source": str(dogs), "read": 8, "drawn": 8},
    ]
    assert (record["config"]["data"], record["config"]["eval_data"]) == ([str(cats), str(dogs)], str(held))
    assert RunRecord.model_validate_json((tmp_path / "run" / "result.json").read_text()).content() == record
    status, _, err = command("tune", "--config", tmp_path / "run" / "run.yaml", "--out", tmp_path / "again")
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "again" / "result.json").read_text())["hashes"] == record["hashes"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (("--data", "a.jsonl", "--data", "a.jsonl=2"), "there is no file a.jsonl=2"),
        (
            ("--data", "a.jsonl", "--eval-data", "none.jsonl"),
            "--eval-data: there is no file none.jsonl. --eval-data takes a .jsonl, ",
        ),
        (("--data", "a.jsonl", "--data", "a.jsonl"), "a.jsonl comes twice"),
        (("--task", "sst2", "--eval-data", "a.jsonl"), "--eval-data is for your own rows"),
    ],
)
def test_what_cannot_be_read_is_one_line(  # type: ignore[no-untyped-def]
    command, data: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", pairs("cats", 3))
    status, _, err = command(*WORDS, *data, "--out", "run")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(reason, err)


def test_a_dry_run_marks_every_turn_that_has_the_loss(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = tmp_path / "model"
    shutil.copytree(pocket_model_path(), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %} "
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(model)
    answer = {"role": "assistant", "content": "two cats"}
    turns = [[{"role": "user", "content": f"{i} cats ?"}, answer] * 2 for i in range(12)]
    rows = write(tmp_path / "rows.jsonl", [{"messages": own} for own in turns])
    words = ["tune", "--model", model, *WORDS[3:], "--data", rows, "--out", tmp_path / "run", "--dry-run"]
    shown = {loss_on: command(*words, "--loss-on", loss_on)[1] for loss_on in ("last", "all")}
    assert [text.count("⟦two cats<|endoftext|>⟧") for text in shown.values()] == [3, 6]  # three rows


def test_what_is_not_used_dropped_or_changed_is_shown_without_a_folder_and_recorded(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    bad = [{"prompt": "Who ?", "completion": ""}]
    ended = [{"prompt": "Who ?", "completion": " Tom<|endoftext|>", "source": "b"}]
    rows = write(
        tmp_path / "rows.jsonl", [{**row, "id": i} for i, row in enumerate([*pairs("cats", 12), *bad, *ended])]
    )
    words = (*WORDS, "--data", rows, "--skip-bad")
    lines = (
        "Read 14 rows by prompt and completion; 1 left out (column 'completion' must hold text). "
        "2 columns not used: id and source. 1 row changed: <|endoftext|> stood in a text where it is written anyway"
    )
    status, out, err = command(*words, "--dry-run")
    assert (status, err) == (0, "")
    assert lines in " ".join(out.split())
    assert out.count("(the marked part carries the loss)") == 3
    assert not list(tmp_path.glob("*/"))
    status, _, err = command(*words)
    assert (status, err.count("\n")) == (2, 1)
    assert "Give --out DIR, or --dry-run" in err
    status, out, err = command(*words, "--out", tmp_path / "run")
    assert (status, err) == (0, "")
    assert "2 columns not used: id and source" in " ".join(out.split())
    used = json.loads((tmp_path / "run" / "result.json").read_text())["rows"]
    assert used["unused_columns"] == ["id", "source"]
    assert list(used["changed"].values()) == [1]
