"""Reading a data set of the hub's schema: what is empty is said, and nothing of the user's is changed."""

from __future__ import annotations

from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from frozencore.errors import DataError
from frozencore.tune.tasks.hub_rows import HubDataset

SOURCE = HubDataset(path="org/name", train_split="train", evaluation_split="test", columns=("sentence", "label"))


def write_train(root: Path, rows: list[dict[str, object]]) -> None:
    folder = root / "org" / "name"
    folder.mkdir(parents=True)
    schema = pyarrow.schema({"sentence": pyarrow.string(), "label": pyarrow.int64()})
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), folder / "train.parquet")


def test_a_split_without_rows_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "train.csv").write_text("sentence,label\n")
    with pytest.raises(DataError, match='org/name could not be read from .*"train" corresponds to no data') as error:
        SOURCE.rows("train", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("are_wanted", [True, False])
def test_reading_shows_no_bar_and_leaves_bars_as_the_user_has_them(
    are_wanted: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"sentence": "a", "label": 1}]
    write_train(tmp_path, rows)
    before = datasets.are_progress_bars_disabled()
    (datasets.enable_progress_bars if are_wanted else datasets.disable_progress_bars)()
    try:
        assert list(SOURCE.rows("train", tmp_path)) == rows
        assert datasets.are_progress_bars_disabled() != are_wanted
        assert "%|" not in capfd.readouterr().err
    finally:
        (datasets.disable_progress_bars if before else datasets.enable_progress_bars)()
