"""Where trials are scored: for each task of the paper's campaigns, in what a plan says, and in the records."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fixtures import LAB
from frozencore.errors import NoRowsError
from frozencore.options import options_of
from frozencore.tune.config import RunConfig
from frozencore.tune.config_parts import RowsConfig
from frozencore.tune.rows.prompts import PromptEncoder
from frozencore.tune.rows.row import Row
from frozencore.tune.rows.splits import Splits
from frozencore.tune.run_rows import drawn_for_run, prepare_rows
from frozencore_lab.campaign import results
from frozencore_lab.campaign.job import Job, Place, make_job
from frozencore_lab.campaign.plan import Planned, plan, search_rows
from frozencore_lab.campaign.shared_moments import moments_file
from frozencore_lab.campaign.spec import read_campaign
from input_files import write_hub_folder, write_task
from small_campaign import write_spec

TENTH = "10% of train"
TRIALS = {  # trained on, scored on, which those are; final runs: trained on, evaluated (paper, table "datasets")
    "svamp": (630, 70, TENTH, 700, 300),
    "rte": (2000, 490, "unused train rows", 2000, 277),
    "arc_challenge": (1119, 299, "official validation", 1119, 500),
    "hellaswag": (2000, 500, "unused train rows", 2000, 500),
}
"""One task for each way to come by rows; tests/tune/tasks has the sizes of every task's splits."""


@cache
def planned() -> list[Planned]:
    """The runs of a paper campaign of which nothing is there."""
    return plan(read_campaign(LAB / "campaigns" / "paper-3b.yaml"), lambda _: None)


def jobs_of(name: str) -> tuple[Job, Job]:
    """A trial of a paper campaign on that task, and a final run."""
    trial = next(run.job for run in planned() if run.job and run.axes["task"] == name)
    return trial, Job(trial.kind, trial.config.replaced(evaluate_on="evaluation"))


def splits_of(config: RunConfig) -> Splits[Row]:
    return drawn_for_run(config.rows, config.scoring)


@pytest.mark.parametrize("name", TRIALS)
def test_trials_of_the_papers_campaigns_are_scored_on_rows_that_nothing_else_uses(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if name == "rte":
        write_hub_folder(root := tmp_path, name, 2490, 277)
    else:
        root = request.getfixturevalue("shared_data")
    trial, final = (splits_of(Place(root).put(job.config)) for job in jobs_of(name))
    expected = TRIALS[name]
    assert (len(trial.train), len(trial.validation), trial.validation_from) == expected[:3]
    assert (len(final.train), len(final.evaluation)) == expected[3:]
    assert trial.evaluation == final.evaluation
    scored, trained = ({row.id for row in rows} for rows in (trial.validation, trial.train))
    assert not scored & (trained | {row.id for row in trial.evaluation})
    if expected[2] != TENTH:
        assert trial.train == final.train


SEARCH = """
name: searched
models: {pocket: pocket}
base:
  {batch_size: 8, accumulation: 1, dtype: float32, epochs: 1, calibration_size: 8, rank: 4, paper_steps: true}
studies:
  main:
    title: One task
    axes: {model: [pocket], task: [TASK], method: [fcca], seed: [42]}
    search: {grids: [{warmup: [0.03, 0.1]}]}
"""


def spec_of(folder: Path, task: str) -> Path:
    return write_spec(folder, SEARCH.replace("TASK", task))


def test_a_plan_says_where_each_search_is_scored(
    command: Callable[..., Any], shared_data: Path, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, "svamp, rte")
    status, out, _ = command("campaign", "plan", spec, "--out", tmp_path / "out", "--data-root", shared_data)
    (svamp,) = (line.split() for line in out.splitlines() if "svamp" in line)
    assert (status, svamp[3], svamp[5], " ".join(svamp[7:10])) == (0, "630", "70", TENTH)
    assert "Rows of rte: could not look. Data set nyu-mll/glue (rte) could not be read" in " ".join(out.split())


@pytest.mark.parametrize("words", [("plan",), ("plan", "--ids"), ("run", "--workers", "0")])
def test_a_search_without_rows_is_refused_before_anything_starts(
    words: tuple[str, ...], command: Callable[..., Any], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, write_task(tmp_path, num_train=1))
    status, _, error = command("campaign", words[0], spec, *words[1:], "--out", tmp_path / "out")
    assert status == 2
    assert "Study 'main' searches on task" in error
    assert "sums.yaml', but has no rows for it: " in error
    assert "leaves no validation rows beside its 1 to train on" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_empty_task_is_no_task_that_could_not_be_looked_at(tmp_path: Path) -> None:
    campaign = read_campaign(spec_of(tmp_path, write_task(tmp_path, num_train=0, num_evaluation=1)))
    (tmp_path / "train.jsonl").write_text((tmp_path / "evaluation.jsonl").read_text())  # what is evaluated is not used
    with pytest.raises(NoRowsError, match="Study 'main' searches on task .* needs rows to train on"):
        search_rows(plan(campaign, lambda _: None), Place())


OPTIONS: dict[str, Any] = {"model": "pocket", "seed": 42, "calibration_size": 16, "paper_steps": True}


def test_trials_and_final_runs_share_moments_where_they_calibrate_on_the_same_rows(
    byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    sums = {**OPTIONS, "task": write_task(tmp_path, num_train=20)}
    plenty = {**OPTIONS, "task": "pocket-sentiment", "num_train": 16, "num_evaluation": 4}
    encoder = PromptEncoder(byte_tokenizer())
    files = [
        moments_file(
            config := make_job("tune", {**options, "evaluate_on": scored_on}).config,
            prepare_rows(config.rows, config.scoring, encoder),
        )
        for options in (sums, plenty)
        for scored_on in ("validation", "evaluation")
    ]
    assert files[0] != files[1]
    assert files[2] == files[3]
    assert len(set(files)) == 3


def test_rows_are_decided_by_all_options_of_rows_but_those_of_place_calibration_and_seed() -> None:
    assert options_of(RowsConfig).keys() - {*results._DECIDE_ROWS} == {
        "data_root", "calibration_size", "calibration_batch", "calibration_data", "seed",
    }  # fmt: skip
