"""``frozencore task``: the list of tasks, and a task's rows as files that ``tune`` reads as it reads the task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frozencore.tune.config import make_config
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.run_rows import RunRows, prepare_rows
from frozencore_lab.tasks.registry import TASKS

Command = Callable[..., tuple[int, str, str]]
SIZE = {"num_train": 40, "num_evaluation": 12}


def test_every_task_is_listed(command: Command) -> None:
    status, out, _ = command("task")
    assert status == 0
    assert all(name in out for name in TASKS)


@pytest.mark.parametrize("name", ["pocket-sentiment", "pocket-math"])
def test_the_written_rows_are_those_of_the_task(
    name: str, command: Command, encoder: PromptEncoder, tmp_path: Path
) -> None:
    flags = ("--num-train", "40", "--num-evaluation", "12", "--out", tmp_path / "rows")
    status, out, error = command("task", name, *flags)
    assert (status, error) == (0, "")
    files = {"data": str(tmp_path / "rows/train.jsonl"), "eval_data": str(tmp_path / "rows/evaluation.jsonl")}
    assert f"--data {files['data']} --eval-data {files['eval_data']}" in " ".join(out.split())

    def read(**given: Any) -> RunRows:
        config = make_config(model="any", **given)
        return prepare_rows(config.rows, config.scoring, encoder)

    of_files, of_task = read(**files), read(data=f"task:{name}", **SIZE)
    for part in ("train", "held_out"):
        ours, theirs = getattr(of_files, part), getattr(of_task, part)
        assert [row.input_ids for row in ours] == [row.input_ids for row in theirs]
        assert [row.choices and row.choices.choice_ids for row in ours] == [
            row.choices and row.choices.choice_ids for row in theirs
        ]
    ids = [json.loads(line)["id"] for line in (tmp_path / "rows/train.jsonl").read_text().splitlines()]
    assert ids == [row.id for row in of_task.train]
    assert (of_files.scored.scoring == "choice") == (of_task.scored.scoring == "choice")
    assert command("task", name, *flags)[0] == 2  # no file is overwritten


def test_a_task_by_its_short_flag_is_the_source_of_that_name() -> None:
    short = make_config(model="any", task="sst2", calibration_task="svamp", forgetting=("cola",))
    assert short == make_config(model="any", data="task:sst2", calibration_data="task:svamp", forgetting=("task:cola",))
