"""Few rows in place of many: their splits are formed as in the real run."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from datasets import Dataset

from frozencore.errors import DataError
from frozencore.tune.run.config import RunConfig, make_config
from frozencore.tune.run.read_rows import task_splits
from frozencore.tune.suite import PAPER_TASKS, find_task
from frozencore.tune.tasks.hub_rows import write_hub_folders
from frozencore_lab.rehearsal.rehearsal_rows import RehearsalPlace, lay_out, rows_to_train
from small_task import write_task

PAPER = {"model": "any", "paper_steps": True}


def place_of(configs: list[RunConfig], root: Path, data_root: Path | None = None) -> RehearsalPlace:
    rows = lay_out(configs, root, data_root)
    return RehearsalPlace(rows.root, num_train=rows.num_train)


def write_real_sizes(name: str, root: Path) -> None:
    """As many made-up rows as the official splits have."""
    source = PAPER_TASKS[name].source
    rng = Random(1)
    splits = {
        split: Dataset.from_list([source.made_up(rng, i) for i in range(count)])  # type: ignore[attr-defined]
        for split, count in source.num_rows.items()  # type: ignore[attr-defined]
    }
    write_hub_folders(root, {source: splits})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "name", ["svamp", "rte", *(pytest.param(n, marks=pytest.mark.slow) for n in ("arc_challenge", "mrpc"))]
)
def test_rows_to_search_on_come_from_where_the_real_ones_do(name: str, tmp_path: Path) -> None:
    final = make_config(**PAPER, task=name)
    trial = final.model_copy(update={"evaluate_on": "validation"})
    write_real_sizes(name, tmp_path / "real")
    place = place_of([final, trial], tmp_path / "few")
    for config in (final, trial):
        real = task_splits(config.model_copy(update={"data_root": tmp_path / "real"}))
        few = task_splits(place.put(config))
        assert few.validation_from == real.validation_from
        assert len(few.train) + len(few.validation) + len(few.evaluation) < 30
        trains_on_all = len(real.train) == PAPER_TASKS[name].source.num_rows["train"]  # type: ignore[attr-defined]
        assert trains_on_all == (len(few.train) == len(few_rows(name, tmp_path / "few")))


def few_rows(name: str, root: Path) -> list[object]:
    return list(PAPER_TASKS[name].source.rows("train", root))


@pytest.mark.parametrize("name", [*PAPER_TASKS, "hellaswag-text", "pocket-math"])
@pytest.mark.parametrize("batch", [(1, 8), (8, 1), (4, 4)])
def test_a_trial_makes_two_steps_on_what_it_is_left(name: str, batch: tuple[int, int], tmp_path: Path) -> None:
    task = find_task(name)
    config = make_config(**PAPER, task=name, evaluate_on="validation", batch_size=batch[0], accumulation=batch[1])
    rows = rows_to_train(task, config)
    trained = rows - max(1, round(rows / 10))
    assert -(-trained // (batch[0] * batch[1])) * min(2, task.epochs) >= 2
    assert rows <= batch[0] * batch[1] + 4


def test_a_task_that_shares_its_rows_with_one_of_more_makes_two_steps_too(tmp_path: Path) -> None:
    """hellaswag trains on 2,000 rows and hellaswag-text on 1,600 of the same: each is left rows enough."""
    configs = [make_config(**PAPER, task=name, epochs=1) for name in ("hellaswag", "hellaswag-text")]
    place = place_of(configs, tmp_path)
    for config in configs:
        few = task_splits(place.put(config))
        assert len(few.train) > config.batch_size * config.accumulation, config.task


def test_real_rows_are_taken_where_they_are_at_hand_and_the_others_said(tmp_path: Path) -> None:
    write_real_sizes("rte", tmp_path / "real")
    configs = [make_config(**PAPER, task=name) for name in ("rte", "mrpc", "svamp")]
    data = lay_out(configs, tmp_path / "few", tmp_path / "real")
    assert data.at_hand == ["nyu-mll/glue (rte)"]
    assert set(data.made_up) == {"nyu-mll/glue (mrpc)", "ChilleD/SVAMP"}
    assert "there is no such folder" in data.made_up["ChilleD/SVAMP"]
    real = {row["sentence1"] for row in PAPER_TASKS["rte"].source.rows("train", tmp_path / "real")}
    few = [row["sentence1"] for row in PAPER_TASKS["rte"].source.rows("train", tmp_path / "few")]
    assert set(few) <= real
    assert len(few) < 20
    assert data.texts


def test_tasks_that_a_run_may_forget_have_rows_too(tmp_path: Path) -> None:
    place = place_of([make_config(**PAPER, task="rte", forgetting=("svamp",))], tmp_path)
    assert len(PAPER_TASKS["svamp"].source.rows("evaluation", place.data_root)) == 6


def test_a_users_own_task_is_rehearsed_on_a_few_of_its_rows(tmp_path: Path) -> None:
    path = write_task(tmp_path / "mine", num_train=300, num_evaluation=50)
    final = make_config(**PAPER, task=path)
    place = place_of([final], tmp_path / "few")
    few = task_splits(place.put(final))
    assert (len(few.train), len(few.evaluation)) == (10, 6)
    (tmp_path / "mine" / "train.jsonl").unlink()
    with pytest.raises(DataError, match="no file"):
        place_of([final], tmp_path / "other")


def test_a_rehearsed_run_is_small(tmp_path: Path) -> None:
    configs = [make_config(**PAPER, task="svamp", calibration_size=size) for size in (2, 64, 512)]
    rows = lay_out(configs, tmp_path, None)
    place = RehearsalPlace(rows.root, "cpu", {"any": "elsewhere"}, num_train=rows.num_train, stand_ins=("any",))
    put = [place.put(config) for config in configs]
    assert [config.calibration_size for config in put] == [2, 4, 4]
    assert place.put(configs[0].model_copy(update={"rank": 64})).calibration_size == 8  # a token for each direction
    assert {(c.num_train, c.num_evaluation, c.epochs, c.max_new_tokens, c.max_length, c.model) for c in put} == {
        (5, 6, 2, 3, 2048, "elsewhere")
    }
    assert place.put(configs[0].model_copy(update={"truncate": True, "max_length": 64})).max_length == 64
