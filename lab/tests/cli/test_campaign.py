"""``frozencore campaign`` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frozencore.tune.pocket import pocket_model_path
from places import PAPER_TABLES
from small_campaign import write_spec

PAPER = PAPER_TABLES / "paper_q3.csv"
ONE_STUDY = """
name: one-study
models: {pocket: pocket}
base: {batch_size: 8, accumulation: 1, num_train: 16, num_evaluation: 8, epochs: 1, calibration_size: 16}
studies:
  main:
    title: Two methods
    axes: {model: [pocket], task: [pocket-sentiment, pocket-comparison], method: [fcca, random], seed: [42]}
    report: {reference: fcca, figure: ranking}
"""
Command = Callable[..., tuple[int, str, str]]
Call = Callable[..., str]


@pytest.fixture
def call(command: Command) -> Callable[..., str]:
    """Runs ``frozencore campaign`` and gives what it printed; with ``status``, its errors."""

    def run(*words: str, status: int = 0) -> str:
        came, out, err = command("campaign", *words)
        assert came == status, err
        return err if status == 2 else out

    return run


# A worker in a process started anew, as users have it, needs ten seconds for its imports.
@pytest.mark.parametrize("num_workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_plan_run_status_and_report(num_workers: str, call: Call, tmp_path: Path) -> None:
    spec, folder = str(write_spec(tmp_path, ONE_STUDY)), str(tmp_path / "out")
    planned = call("plan", spec, "--out", folder)
    assert "4 different runs" in planned
    assert "4 ready" in planned
    assert "Estimate for the 4 runs left" in planned
    assert not Path(folder).exists()

    listed = call("plan", spec, "--out", folder, "--runs").splitlines()
    assert len([line for line in listed if " left main final model=pocket" in line]) == 4
    ids = call("plan", spec, "--out", folder, "--ids").split()
    assert len(set(ids)) == 4
    ran = call("run", spec, "--out", folder, "--workers", num_workers)
    assert "4 runs finished, 0 failed, 0 left" in ran
    assert {path.name for path in Path(folder, "runs").iterdir()} == set(ids)
    records = [json.loads(path.read_text()) for path in Path(folder, "runs").glob("*/result.json")]
    assert {record["provenance"]["num_threads"] for record in records} == {torch.get_num_threads()}

    assert "one-study: 4 done, 0 running, 0 failed, 0 left" in call("status", folder)
    assert "is finished already" in call("one", ids[0], "--out", folder)
    assert "4 of 4 final runs have a result" in call("report", folder)
    page = Path(folder, "report", "index.html").read_text(encoding="utf-8")
    assert "Two methods" in page
    assert "http" not in page.split("<body", 1)[-1].split("src=", 1)[0]


def test_one_makes_a_run_and_its_failure_is_one_line(call: Call, tmp_path: Path) -> None:
    text = ONE_STUDY.replace("task: [pocket-sentiment, pocket-comparison]", "task: [svamp, pocket-comparison]")
    spec, folder = str(write_spec(tmp_path, text)), str(tmp_path / "out")
    svamp = call("plan", spec, "--out", folder, "--ids").split()[0]
    call("run", spec, "--out", folder, "--workers", "0", "--data-root", str(tmp_path), status=1)
    failed = call("one", svamp, "--out", folder, "--data-root", str(tmp_path), status=2)
    assert "failed (bad input): Data set ChilleD/SVAMP must lie at" in failed
    assert len(failed.strip().splitlines()) == 1
    unknown = call("one", "0" * 16, "--out", folder, status=2)
    assert "has no run" in unknown
    assert "2 done, 0 running, 2 failed, 0 left" in call("status", folder)


def test_a_table_of_task_means_is_analysed(call: Call, tmp_path: Path) -> None:
    shown = call("report", "--table", str(PAPER), "--reference", "FCCA", "--json", str(tmp_path / "a.json"))
    assert "RawGrad" in shown
    assert json.loads((tmp_path / "a.json").read_text())
    assert "FCCA" in call("report", "--table", str(PAPER), "--reference", "fca", status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report",), "give one of them"),
        (("report", "/nowhere", "--table", str(PAPER), "--reference", "FCCA"), "give one of them"),
        (("report", "--table", str(PAPER)), "needs --reference"),
        (("status", "/nowhere"), "no campaign's folder"),
        (("plan", "/nowhere.yaml"), "There is no file"),
        (("run", str(PAPER)), "must hold a campaign"),
    ],
)
def test_bad_input_is_one_line(call: Call, arguments: tuple[str, ...], message: str) -> None:
    answer = call(*arguments, status=2)
    assert message in answer
    assert len(answer.strip().splitlines()) == 1


def test_the_schema_is_json(command: Command) -> None:
    status, out, _ = command("schema")
    assert status == 0
    assert json.loads(out)["title"] == "Campaign"


def test_a_model_of_the_campaign_may_lie_in_a_folder_that_the_command_names(call: Call, tmp_path: Path) -> None:
    text = ONE_STUDY.replace("{pocket: pocket}", "{pocket: nobody/has-this}").replace("reference: fcca, ", "")
    text = text.replace("[fcca, random]", "[random]")
    spec, folder = str(write_spec(tmp_path, text)), str(tmp_path / "out")
    run_id = call("plan", spec, "--out", folder, "--ids").split()[0]
    assert "nobody/has-this" in call("one", run_id, "--out", folder, status=2)
    made = call("one", run_id, "--out", folder, "--model-path", f"pocket={pocket_model_path()}")
    assert f"{run_id} finished" in made
    assert "1 left" in call("status", folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("pocket", "--model-path takes NAME=FOLDER, got 'pocket'"),
        ("=folder", "--model-path takes NAME=FOLDER, got '=folder'"),
        ("pocket=", "--model-path takes NAME=FOLDER, got 'pocket='"),
        ("other=folder", "the campaign's models are pocket"),
    ],
)
def test_a_model_path_that_names_no_model_or_no_folder_is_one_line(
    given: str, message: str, call: Call, tmp_path: Path
) -> None:
    spec = str(write_spec(tmp_path, ONE_STUDY))
    answer = call("plan", spec, "--out", str(tmp_path / "out"), "--model-path", given, status=2)
    assert message in answer
    assert len(answer.strip().splitlines()) == 1
