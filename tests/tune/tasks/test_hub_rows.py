"""Rows of data sets of the hub: read from folders of its schema and from its cache."""

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
from frozencore.files.hub import HUB_TIMEOUT_S
from frozencore.tune.suite import PAPER_TASKS, find_task
from frozencore.tune.tasks import HubDataset
from frozencore.tune.tasks.splits import evaluation_rows, split_task
from hub_folders import ROWS, write_hub_folder

SOURCE = HubDataset(path="org/name", train_split="train", evaluation_split="test", columns=("sentence", "label"))


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
    with pytest.raises(DataError, match=r"org/name is not in the offline cache .*--data-root DIR.*or a network"):
        SOURCE.rows("train", None)


def test_a_cached_data_set_is_read_at_once_without_the_hub_and_a_split_it_lacks_is_one_line(silent_hub: Path) -> None:
    rows = [{"sentence": f"s{i}", "label": i % 2} for i in range(5)]
    put_into_cache(silent_hub, rows)
    started = time.monotonic()
    assert list(SOURCE.rows("train", None)) == rows
    with pytest.raises(DataError, match=r'from the hub or its cache: .*"test"') as error:
        SOURCE.rows("evaluation", None)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < HUB_TIMEOUT_S
    assert not datasets.config.HF_HUB_OFFLINE


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
def test_a_row_of_the_hub_is_a_prompt_with_its_choices_after_it(name: str) -> None:
    example = find_task(name).to_example(ROWS[name], "train-0")
    completion, num_choices, end = EXPECTED[name]
    assert example.completion == completion
    assert len(example.choices) == num_choices
    assert example.prompt.endswith(end)
    assert all(choice.startswith(" ") for choice in example.choices)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_folder_of_the_hubs_schema_is_split_and_evaluated(name: str, tmp_path: Path) -> None:
    write_hub_folder(tmp_path, name, num_train=30, num_evaluation=8)
    splits = split_task(find_task(name), tmp_path, num_train=20)
    assert (len(splits.train), len(splits.validation), len(splits.evaluation)) == (20, 10, 8)
    assert evaluation_rows(find_task(name), tmp_path) == splits.evaluation


def test_another_folder_of_the_same_card_gives_its_own_rows(tmp_path: Path) -> None:
    """The cache of ``datasets`` takes both for one."""
    for root, count in (("a", 3), ("b", 5), ("a", 4)):
        write_hub_folder(tmp_path / root, "rte", num_train=2, num_evaluation=count)
        assert len(evaluation_rows(find_task("rte"), tmp_path / root)) == count


def test_rows_of_the_unlabeled_test_split_are_refused_in_one_line(tmp_path: Path) -> None:
    for name, changes, column in (("rte", {"label": -1}, "label"), ("winogrande", {"answer": ""}, "answer")):
        write_hub_folder(tmp_path, name, num_train=2, num_evaluation=2, **changes)
        with pytest.raises(DataError, match=rf"Row evaluation-0: column '{column}' must hold") as error:
            evaluation_rows(find_task(name), tmp_path)
        assert "\n" not in str(error.value)


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


def test_the_official_sizes_are_those_that_the_datas_card_states(shared_data: Path) -> None:
    card = (shared_data / "README.md").read_text()
    stated = {
        (path, split): int(official)
        for path, split, official in re.findall(r"`(\S+)/(\w+)\.parquet` \| \d+ \| (\d+) \|", card)
    }
    ours = {
        (f"{task.source.path}/{task.source.config or 'default'}", split): count  # type: ignore[attr-defined]
        for task in PAPER_TASKS.values()
        for split, count in task.source.num_rows.items()  # type: ignore[attr-defined]
    }
    assert len(stated) == 15
    assert {key: ours[key] for key in stated} == stated
    assert all(count > 0 for count in ours.values())


def test_two_configurations_under_one_card_are_read(tmp_path: Path) -> None:
    for name in ("rte", "mrpc"):
        write_hub_folder(tmp_path, name, num_train=30, num_evaluation=60)
    for name in ("rte", "mrpc"):
        splits = split_task(PAPER_TASKS[name], tmp_path, num_train=20, num_evaluation=50)
        assert (len(splits.train), len(splits.validation), len(splits.evaluation)) == (20, 10, 50)
