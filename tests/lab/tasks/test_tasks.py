"""Rows of the paper's tasks as examples, and what a bad row or a missing data set says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frozencore.errors import DataError
from frozencore.lab.scoring.answers import parse_answer, parse_number
from frozencore.lab.tasks import sst2, svamp
from frozencore.lab.tasks.hub import HubDataset

SVAMP_ROW = {"Body": "Tom has 3 pens", "Question": "How many pens has he?", "Answer": "3"}


def test_a_svamp_row_is_a_question_with_a_marked_number() -> None:
    example = svamp.to_example(SVAMP_ROW, "train-0")
    assert example.prompt.startswith("Question: Tom has 3 pens. How many pens has he?\n")
    assert example.completion == " The answer is: 3"
    assert example.choices == ()


def test_an_sst2_row_is_a_choice_between_two_words() -> None:
    example = sst2.to_example({"sentence": "a charming journey . ", "label": 1}, "train-0")
    assert example.prompt + example.completion == "Review: a charming journey .\nSentiment: positive"
    assert example.choices == (" negative", " positive")


@pytest.mark.parametrize(
    ("to_example", "row", "column"),
    [
        (svamp.to_example, SVAMP_ROW | {"Answer": "three"}, "Answer"),
        (svamp.to_example, SVAMP_ROW | {"Body": " "}, "Body"),
        (svamp.to_example, {"Body": "a", "Answer": "1"}, "Question"),
        (sst2.to_example, {"sentence": "a", "label": -1}, "label"),
        (sst2.to_example, {"sentence": "a", "label": 2}, "label"),
        (sst2.to_example, {"sentence": "a", "label": None}, "label"),
        (sst2.to_example, {"sentence": None, "label": 1}, "sentence"),
    ],
)
def test_a_bad_row_is_named_with_its_column(to_example, row: dict[str, object], column: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=rf"Row train-7: column '{column}'") as error:
        to_example(row, "train-7")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", [svamp.TASK, sst2.TASK])
def test_every_real_row_is_an_example(task, shared_data: Path) -> None:  # type: ignore[no-untyped-def]
    for split, least in (("train", task.num_train), ("evaluation", task.num_evaluation)):
        rows = task.source.rows(split, shared_data)
        examples = [task.to_example(row, f"{split}-{i}") for i, row in enumerate(rows)]
        assert len(examples) >= least
        if task is svamp.TASK:
            assert all(
                parse_answer(e.completion) == parse_number(r["Answer"]) for e, r in zip(examples, rows, strict=True)
            )
    assert task.source.rows("validation", shared_data) == ()


def source(columns: tuple[str, ...] = ("sentence", "label")) -> HubDataset:
    return HubDataset(path="org/name", train_split="train", evaluation_split="test", columns=columns)


def write_split(root: Path, split: str, rows: list[dict[str, object]]) -> None:
    folder = root / "org" / "name"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_local_folder_of_the_schema_is_read_in_order(tmp_path: Path) -> None:
    rows = [{"sentence": f"s{i}", "label": i % 2} for i in range(5)]
    write_split(tmp_path, "train", rows)
    assert list(source().rows("train", tmp_path)) == rows


def test_a_missing_column_a_missing_split_and_a_missing_folder_are_one_line_each(tmp_path: Path) -> None:
    write_split(tmp_path, "train", [{"sentence": "a"}])
    for split, root, reason in (
        ("train", tmp_path, r"org/name needs the columns .* lacks label \(it has sentence\)"),
        ("evaluation", tmp_path, r"org/name could not be read .*--data-root"),
        ("train", tmp_path / "nowhere", r"there is no such folder.*--data-root"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            source().rows(split, root)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "train.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="could not be read") as error:
        source().rows("train", tmp_path)
    assert "\n" not in str(error.value)


def test_without_hub_and_cache_the_way_out_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"org/name is not in the offline cache .*--data-root DIR.*or a network"):
        source().rows("train", None)
