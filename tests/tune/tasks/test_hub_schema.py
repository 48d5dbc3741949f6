"""The four tasks whose data are not beside this checkout, on rows shaped exactly as the hub's."""

from __future__ import annotations

from pathlib import Path

import pytest

from frozencore.errors import DataError
from frozencore.tune.suite import find_task
from frozencore.tune.tasks.splits import evaluation_rows, split_task
from hub_folders import ROWS, write_hub_folder

EXPECTED = {
    "rte": (" no", 2, "Does the claim follow from the text?\nAnswer:"),
    "mrpc": (" yes", 2, "Do both sentences mean the same?\nAnswer:"),
    "openbookqa": (" plants sprouting, blooming and wilting", 4, "- plants sprouting, blooming and wilting\nAnswer:"),
    "winogrande": (" garage", 2, "What does the blank _ stand for, garage or backyard?\nAnswer:"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_hub_is_a_prompt_with_its_choices_after_it(name: str) -> None:
    example = find_task(name).to_example(ROWS[name], "train-0")
    completion, num_choices, end = EXPECTED[name]
    assert example.completion == completion
    assert len(example.choices) == num_choices
    assert example.prompt.endswith(end)
    assert all(choice.startswith(" ") for choice in example.choices)


@pytest.mark.parametrize("name", ROWS)
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
