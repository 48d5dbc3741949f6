"""Which rows a run got right: kept in its record, or read from the predictions beside an older one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frozencore.lab.campaign.answers import with_answers
from frozencore.lab.campaign.store import Store
from made_up import made_up_record, record_content

RUN = "0123456789abcdef"
ROWS = [{"id": f"evaluation-{i}", "correct": correct} for i, correct in enumerate((True, False, True))]


def predictions(folder: Path, rows: list[dict[str, object]]) -> Path:
    file = folder / "predictions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_an_older_record_learns_its_answers_and_keeps_them_in_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(record_content({"task": "svamp"})))
    predictions(folder, ROWS)
    Store(tmp_path).write_index()
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["score"]["correct"] == "101"
    (folder / "result.json").unlink()
    found = Store(tmp_path).outcome(RUN)
    assert found is not None
    assert found.record is not None
    assert json.loads(found.record.model_dump_json())["score"]["correct"] == "101"


def test_a_record_that_says_it_itself_is_believed(tmp_path: Path) -> None:
    record = made_up_record({"task": "svamp"}, score={"standard_error": 0.1, "correct": "0011"})
    assert with_answers(record, predictions(tmp_path, ROWS)) is record


@pytest.mark.parametrize(
    "text", ["", "{", '{"id": "a"}\n', '{"correct": "yes"}\n', '{"correct": [1]}\n', "[]\n", "1\n", "[" * 100_000]
)
def test_predictions_that_are_damaged_are_as_good_as_none(tmp_path: Path, text: str) -> None:
    record = made_up_record({"task": "svamp"})
    (tmp_path / "predictions.jsonl").write_text(text)
    assert with_answers(record, tmp_path / "predictions.jsonl") is record
    assert with_answers(record, tmp_path / "none.jsonl") is record


def test_records_without_accuracy_have_no_answers(tmp_path: Path) -> None:
    text = made_up_record({"task": "a"}, accuracy=..., accuracy_before=..., score=...)
    compared = made_up_record({"task": "a"}, cosine_P=0.5, cosine_Q=0.5)
    for record in (text, compared):
        assert with_answers(record, predictions(tmp_path, ROWS)) is record
