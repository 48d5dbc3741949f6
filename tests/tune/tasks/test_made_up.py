"""Rows that tasks make up by their hub schema, against the real rows where they are beside this checkout."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from datasets import Dataset

from frozencore.tune.suite import PAPER_TASKS
from frozencore.tune.tasks import Task
from frozencore.tune.tasks.hub_rows import HubDataset, write_hub_folders
from frozencore.tune.tasks.splits import normalised_text, split_task

NUM_ROWS = 200
NUM_CLASSES = {"svamp": 0, "gsm8k": 0, "arc_challenge": 4, "openbookqa": 4, "hellaswag": 4}  # the others: 2


def made_up(task: Task, count: int = NUM_ROWS) -> list[dict[str, Any]]:
    assert isinstance(task.source, HubDataset)
    assert task.source.made_up is not None
    rng = Random(0)
    return [task.source.made_up(rng, number) for number in range(count)]


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_are_examples_of_every_class_and_no_two_read_alike(name: str) -> None:
    task = PAPER_TASKS[name]
    examples = [task.to_example(row, f"train-{i}") for i, row in enumerate(made_up(task))]
    assert len({normalised_text(example) for example in examples}) == NUM_ROWS
    places = {e.choices.index(e.completion) for e in examples if e.choices}
    assert places == set(range(NUM_CLASSES.get(name, 2)))


@pytest.mark.parametrize("name", PAPER_TASKS)
def test_rows_have_the_columns_and_types_of_the_hubs(name: str, shared_data: Path) -> None:
    task = PAPER_TASKS[name]
    if not (shared_data / task.source.path / (task.source.config or "default")).is_dir():  # type: ignore[attr-defined]
        pytest.skip("these rows are not beside this checkout")
    real = task.source.rows("train", shared_data)
    ours = Dataset.from_list(made_up(task, 8))

    def kind(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {key: kind(value) for key, value in feature.items()}
        if hasattr(feature, "feature"):
            return [kind(feature.feature)]
        return re.sub(r"\d+", "", feature.dtype)  # int32 or int64

    assert {name: kind(feature) for name, feature in ours.features.items()} == {
        name: kind(feature)
        for name, feature in real.features.items()  # type: ignore[attr-defined]
    }


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


def test_a_folder_of_made_up_rows_is_read_and_split_as_the_hubs(tmp_path: Path) -> None:
    glue = [PAPER_TASKS[name] for name in ("rte", "mrpc")]
    write_hub_folders(
        tmp_path,
        {
            task.source: {"train": Dataset.from_list(made_up(task, 30)), "validation": Dataset.from_list(made_up(task))}
            for task in glue
        },  # type: ignore[misc]
    )
    for task in glue:  # two configurations under one card
        splits = split_task(task, tmp_path, num_train=20, num_evaluation=50)
        assert len(splits.evaluation) == 50
        assert len(splits.train) + splits.left_out.get("also evaluation rows", 0) + len(splits.validation) == 30
