"""Rows of the hub's data sets, read from folders of their schema and from the cache, as the paper's tasks see them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter

from frozencore.errors import DataError
from frozencore.files.hub_client import HUB_TIMEOUT_S
from frozencore.tune.scoring.answers import parse_answer, parse_number
from frozencore_lab.tasks.paper import ARC_CHALLENGE, GSM8K, HELLASWAG, PAPER_TASKS, SST2, SVAMP, WINOGRANDE
from frozencore_lab.tasks.registry import TASKS, TEXT_TASKS, find_task
from frozencore_lab.tasks.task import HubDataset, Task
from input_files import ROWS, write_hub_folder

SOURCE = HubDataset("org/name", ("sentence", "label"), {"train": "train", "evaluation": "test"})


def write_split(root: Path, split: str, rows: list[dict[str, object]]) -> None:
    folder = root / "org" / "name"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("bars", [True, False])
def test_a_local_folder_is_read_in_order_without_a_bar_and_the_users_bars_stay(
    bars: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"sentence": f"s{i}", "label": i % 2} for i in range(5)]
    write_split(tmp_path, "train", rows)
    before = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if bars else datasets.disable_progress_bars)()
    try:
        assert list(SOURCE.rows("train", tmp_path)) == rows
        assert datasets.are_progress_bars_disabled() != bars
        assert "%|" not in capfd.readouterr().err
    finally:
        (datasets.disable_progress_bars if before else datasets.enable_progress_bars)()


def test_what_is_missing_damaged_or_empty_is_one_line(tmp_path: Path) -> None:
    write_split(tmp_path, "train", [{"sentence": "a"}])
    for name, content in (("train.parquet", b"PAR1 nothing"), ("train.csv", b"sentence,label\n")):
        folder = tmp_path / name / "org" / "name"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(content)
    for split, root, reason in (
        ("train", tmp_path / "train.parquet", "could not be read"),
        ("train", tmp_path / "train.csv", 'org/name could not be read from .*"train" corresponds to no data'),
        ("train", tmp_path, r"org/name needs the columns .* lacks label \(it has sentence\)"),
        ("evaluation", tmp_path, r"org/name could not be read .*--data-root"),
        ("train", tmp_path / "nowhere", r"there is no such folder.*--data-root"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            SOURCE.rows(split, root)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nobody answers; the folder that data sets are cached in."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("silent_hub")
def test_without_hub_and_cache_the_way_out_is_named_at_once() -> None:
    with pytest.raises(
        DataError, match=r"org/name is neither a folder nor in the offline cache, .*--data-root DIR.*or a network"
    ):
        SOURCE.rows("train", None)


def test_a_cached_data_set_is_read_at_once_without_the_hub_and_a_split_it_lacks_is_one_line(silent_hub: Path) -> None:
    rows = [{"sentence": f"s{i}", "label": i % 2} for i in range(5)]
    put_into_cache(silent_hub, rows)
    started, offline = time.monotonic(), datasets.config.HF_HUB_OFFLINE
    assert list(SOURCE.rows("train", None)) == rows
    with pytest.raises(DataError, match=r'from the hub or its cache: .*"test"') as error:
        SOURCE.rows("evaluation", None)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < HUB_TIMEOUT_S
    assert offline == datasets.config.HF_HUB_OFFLINE


def put_into_cache(cache: Path, rows: list[dict[str, object]]) -> None:
    """As ``datasets`` keeps the train split of ``org/name``."""
    folder = cache / "org___name" / "default" / "0.0.0" / "commit"
    folder.mkdir(parents=True)
    features = datasets.Dataset.from_list(rows).features
    with ArrowWriter(path=str(folder / "name-train.arrow"), features=features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    splits = datasets.SplitDict(dataset_name="name")
    splits.add(datasets.SplitInfo("train", num_examples=len(rows), dataset_name="name"))
    told = {"builder_name": "parquet", "dataset_name": "name", "config_name": "default", "version": "0.0.0"}
    datasets.DatasetInfo(features=features, splits=splits, **told).write_to_directory(str(folder))


EXPECTED = {
    "rte": (" no", 2, "Does the claim follow from the text?\nAnswer:"),
    "mrpc": (" yes", 2, "Do both sentences mean the same?\nAnswer:"),
    "openbookqa": (" plants sprouting, blooming and wilting", 4, "- plants sprouting, blooming and wilting\nAnswer:"),
    "winogrande": (" garage", 2, "What does the blank _ stand for, garage or backyard?\nAnswer:"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_folder_of_the_hubs_schema_is_split_into_prompts_with_their_choices(name: str, tmp_path: Path) -> None:
    completion, num_choices, end = EXPECTED[name]
    example = find_task(name).to_row(ROWS[name], "train-0")
    assert (example.completion, len(example.choices)) == (completion, num_choices)
    assert example.prompt.endswith(end)
    assert all(choice.startswith(" ") for choice in example.choices)
    write_hub_folder(tmp_path, name, num_train=30, num_evaluation=8)
    splits = find_task(name).draw(tmp_path, num_train=20)
    assert (len(splits.train), len(splits.validation), len(splits.evaluation)) == (20, 10, 8)
    assert find_task(name).draw_evaluation(tmp_path) == splits.evaluation


def test_another_folder_of_the_same_card_gives_its_own_rows(tmp_path: Path) -> None:
    """The cache of ``datasets`` takes both for one."""
    for root, count in (("a", 3), ("b", 5), ("a", 4)):
        write_hub_folder(tmp_path / root, "rte", num_train=2, num_evaluation=count)
        assert len(find_task("rte").draw_evaluation(tmp_path / root)) == count


def test_two_configurations_under_one_card_are_read(tmp_path: Path) -> None:
    for name in ("rte", "mrpc"):
        write_hub_folder(tmp_path, name, num_train=30, num_evaluation=60)
    for name in ("rte", "mrpc"):
        splits = PAPER_TASKS[name].draw(tmp_path, num_train=20, num_evaluation=50)
        assert (len(splits.train), len(splits.validation), len(splits.evaluation)) == (20, 10, 50)


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_the_rows_of_these_tests_have_the_columns_and_types_of_the_hubs(name: str, shared_data: Path) -> None:
    task = PAPER_TASKS[name]
    if not (shared_data / task.source.path / (task.source.config or "default")).is_dir():  # type: ignore[attr-defined]
        pytest.skip("these rows are not beside this checkout")
    real: Any = task.source.rows("train", shared_data)
    ours = Dataset.from_list([ROWS[name]])

    def kind(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {key: kind(value) for key, value in feature.items()}
        if hasattr(feature, "feature"):
            return [kind(feature.feature)]
        return re.sub(r"\d+", "", feature.dtype)  # int32 or int64

    assert kind(dict(ours.features)) == kind(dict(real.features))


SVAMP_ROW = {"Body": "Tom has 3 pens", "Question": "How many pens has he?", "Answer": "3"}


def test_a_row_is_a_question_with_a_marked_number_or_a_choice() -> None:
    example = SST2.to_row({"sentence": "a charming journey . ", "label": 1}, "train-0")
    assert example.prompt + example.completion == "Review: a charming journey .\nSentiment: positive"
    assert example.choices == (" negative", " positive")
    example = SVAMP.to_row(SVAMP_ROW, "train-0")
    assert example.prompt.startswith("Question: Tom has 3 pens. How many pens has he?\n")
    assert example.completion == " The answer is: 3"
    assert example.choices == ()


ARC_ROW = {"question": "Why?", "choices": {"text": ["dew", "fog", "ice"], "label": ["1", "2", "3"]}, "answerKey": "3"}


def test_a_gsm8k_row_loses_its_calculator_notes_and_keeps_its_marker() -> None:
    answer = "She had 12/60 = $<<12/60=0.2>>0.2 per minute.\n#### 1,010"
    example = GSM8K.to_row({"question": "How much?", "answer": answer}, "train-0")
    assert example.completion == " She had 12/60 = $0.2 per minute.\n#### 1,010"
    assert parse_answer(example.completion) == 1010


def test_an_arc_row_has_any_number_of_options_and_any_labels() -> None:
    example = ARC_CHALLENGE.to_row(ARC_ROW, "train-0")
    assert example.choices == (" dew", " fog", " ice")
    assert example.completion == " ice"
    assert example.prompt == "Question: Why?\nOptions:\n- dew\n- fog\n- ice\nAnswer:"
    five = {"text": list("vwxyz"), "label": list("ABCDE")}
    assert ARC_CHALLENGE.to_row(ARC_ROW | {"choices": five, "answerKey": "E"}, "train-0").completion == " z"


@pytest.mark.parametrize(
    ("task", "row", "column"),
    [
        (SVAMP, SVAMP_ROW | {"Answer": "three"}, "Answer"),
        (SVAMP, SVAMP_ROW | {"Body": " "}, "Body"),
        (SVAMP, {"Body": "a", "Answer": "1"}, "Question"),
        (SST2, {"sentence": "a", "label": -1}, "label"),
        (SST2, {"sentence": "a", "label": 2}, "label"),
        (SST2, {"sentence": "a", "label": None}, "label"),
        (SST2, {"sentence": None, "label": 1}, "sentence"),
        (GSM8K, {"question": "a", "answer": "no marker 5"}, "answer"),
        (ARC_CHALLENGE, ARC_ROW | {"answerKey": "A"}, "answerKey"),
        (ARC_CHALLENGE, ARC_ROW | {"choices": None}, "choices"),
        (ARC_CHALLENGE, ARC_ROW | {"choices": {"text": ["a", " "], "label": ["1", "2"]}}, "choices.text"),
        (ARC_CHALLENGE, ARC_ROW | {"choices": {"text": ["a", "b"], "label": ["1", "2", "3"]}}, "choices"),
        (HELLASWAG, {"activity_label": "a", "ctx": "b", "endings": ["[x]", "c"], "label": "0"}, "endings"),
        (HELLASWAG, {"activity_label": "a", "ctx": "b", "endings": ["c", "d"], "label": ""}, "label"),
        (WINOGRANDE, {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}, "sentence"),
        (WINOGRANDE, ROWS["winogrande"] | {"answer": ""}, "answer"),
    ],
)
def test_a_bad_row_is_named_with_its_column(task: Task, row: dict[str, object], column: str) -> None:
    with pytest.raises(DataError, match=rf"Row train-7: column '{column}'") as error:
        task.to_row(row, "train-7")
    assert "\n" not in str(error.value)


def test_a_text_task_is_one_text_of_its_rows_without_question_or_choice() -> None:
    rows = {
        "gsm8k-text": ({"question": "How much?", "answer": "#### 1"}, "How much?"),
        "sst2-text": ({"sentence": "a charming journey .", "label": 1}, "a charming journey ."),
        "hellaswag-text": (
            {"activity_label": "Health", "ctx": "Turn off the light.", "endings": ["Get up.", "Sleep."], "label": "1"},
            "Health: Turn off the light. Sleep.",
        ),
    }
    assert set(TEXT_TASKS) == set(rows)
    for name, (row, text) in rows.items():
        task = TEXT_TASKS[name]
        assert task.scoring == "text"
        assert task.source == PAPER_TASKS[name.removesuffix("-text")].source
        example = task.to_row(row, "train-0")
        assert (example.id, example.prompt, example.completion) == ("train-0", "", text)


def test_hellaswag_reads_alike_with_the_hubs_tags_and_without() -> None:
    tagged = {
        "activity_label": "Health",
        "ctx": "[header] How to sleep [title] Go to bed. [step] Turn off  the light.",
        "endings": ["[substeps] Lie down.", "Get up.", "Run.", "Eat."],
        "label": "0",
    }
    clean = tagged | {
        "ctx": "How to sleep. Go to bed. Turn off the light.",
        "endings": ["Lie down.", "Get up.", "Run.", "Eat."],
    }
    example = HELLASWAG.to_row(tagged, "row")
    assert example == HELLASWAG.to_row(clean, "row")
    assert example.prompt == "Health: How to sleep. Go to bed. Turn off the light."
    assert example.completion == " Lie down."


def test_the_suite_is_the_papers_table() -> None:
    """Appendix, table "Complete dataset protocol": task, train, evaluation, epochs."""
    sizes = {task.name: (task.num_train, task.num_evaluation, task.epochs) for task in PAPER_TASKS.values()}
    assert sizes == {
        "svamp": (700, 300, 3), "gsm8k": (1500, 300, 2), "sst2": (2000, 500, 1), "qnli": (2000, 500, 1),
        "cola": (2000, 500, 2), "rte": (2000, 500, 3), "mrpc": (2000, 500, 3), "arc_challenge": (1119, 500, 3),
        "openbookqa": (2000, 500, 3), "hellaswag": (2000, 500, 2), "winogrande": (2000, 500, 2),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["svamp", "gsm8k", "sst2", "qnli", "cola", "arc_challenge", "hellaswag"])
def test_every_real_row_is_an_row(name: str, shared_data: Path) -> None:
    task = TASKS[name]
    for split, least in (("train", task.num_train), ("evaluation", task.num_evaluation)):
        rows = task.source.rows(split, shared_data)
        examples = [task.to_row(row, f"{split}-{i}") for i, row in enumerate(rows)]
        assert len(examples) >= least
        assert all(not example.choices or example.completion in example.choices for example in examples)
        if task is ARC_CHALLENGE:
            assert {len(example.choices) for example in examples} >= {3, 4}
            for row, example in zip(rows, examples, strict=True):
                texts, labels = row["choices"]["text"], row["choices"]["label"]
                assert example.completion == f" {texts[labels.index(row['answerKey'])].strip()}"
        if task is SVAMP:
            assert all(
                parse_answer(e.completion) == parse_number(r["Answer"]) for e, r in zip(examples, rows, strict=True)
            )
    assert len(task.source.rows("validation", shared_data)) == (299 if name == "arc_challenge" else 0)
