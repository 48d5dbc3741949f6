"""The step that a run keeps: in its record and its adapter, after a kill, and where there is nothing to choose on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from fixtures import LAB
from frozencore.progress import no_progress
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.record import SelectedCheckpoint, TunedRecord
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.run import execute
from frozencore.tune.scores import sample_rows
from frozencore.tune.scoring.score import score_rows
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from input_files import write_task
from small_runs import inputs_of


def config_of(**overrides: Any) -> RunConfig:
    """A few rows at a high rate: the last step is not the best one."""
    few = {
        "model": str(pocket_model_path()), "task": "pocket-entailment", "rank": 8, "calibration_size": 8,
        "batch_size": 8, "accumulation": 1, "epochs": 4, "num_train": 16, "num_evaluation": 24, "device": "cpu",
        "learning_rate": 0.05, "warmup": 0.0, "seed": 44, "core": {"coordinates": "qr", "alpha": None},
        "select_checkpoint": "epoch", "bits": 32,
    }  # fmt: skip
    return make_config(**{**few, **overrides})


def chosen(record: TunedRecord) -> SelectedCheckpoint:
    assert record.selection is not None
    return record.selection


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TunedRecord, Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return execute(config_of(), folder, no_progress), folder


def test_the_adapter_is_of_the_step_that_scored_best_and_the_record_says_so(whole: tuple[TunedRecord, Path]) -> None:
    record, folder = whole
    found = chosen(record)
    assert json.loads((folder / "result.json").read_text())["selection"] == found.content()
    assert [score.step for score in found.scores] == [2, 4, 6, 8]
    best = max(found.scores, key=lambda score: (score.accuracy, -score.held_out_loss))
    assert (found.kept_step, found.by, found.rows, found.every) == (best.step, "accuracy", 24, "epoch")
    assert found.kept_step < record.training.num_steps  # or this would show nothing

    prepared = inputs_of(config_of(evaluate_on="validation"))
    score = score_rows(
        PeftModel.from_pretrained(prepared.model, folder / "adapter"), prepared.encoder, prepared.rows.scored
    )
    assert score.task is not None
    assert (score.task.accuracy, score.held_out_loss) == (best.accuracy, best.held_out_loss)


def test_without_the_option_the_last_step_is_kept_and_nothing_is_said(
    whole: tuple[TunedRecord, Path], tmp_path: Path
) -> None:
    record = execute(config_of(select_checkpoint="none"), tmp_path / "run", no_progress)
    assert not record.has("selection")
    assert record.hashes.validation is None
    assert whole[0].hashes.validation is not None
    assert record.training.losses == whole[0].training.losses
    assert record.held_out_loss != whole[0].held_out_loss


def test_the_loss_alone_chooses_where_it_is_asked_or_there_is_no_accuracy(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Tom has {i} cats ."}) + "\n" for i in range(40)))
    few = {"epochs": 1, "learning_rate": "auto", "select_checkpoint": 2, "num_evaluation": 8}
    configs = (config_of(**few, select_by="held_out_loss"), config_of(**few, task=None, data=rows))
    for i, config in enumerate(configs):
        record = execute(config, tmp_path / f"{i}", no_progress)
        assert record.has("accuracy") == (tmp_path / f"{i}" / "predictions.jsonl").exists() == (i == 0)
        found = chosen(record)
        assert found.by == "held_out_loss"
        assert {score.accuracy for score in found.scores} == {None}
        assert found.kept_step == min(found.scores, key=lambda score: score.held_out_loss).step


def test_final_runs_that_train_on_all_rows_keep_their_last_step_and_say_why(tmp_path: Path) -> None:
    """SVAMP's, under the paper's campaigns."""
    options = {"task": write_task(tmp_path, num_train=20), "paper_steps": True, "epochs": 1, "num_train": None}
    final = execute(config_of(**options, learning_rate="auto"), tmp_path / "final", no_progress)
    found = chosen(final)
    assert (found.rows, found.by, found.scores, found.kept_step) == (0, None, (), final.training.num_steps)
    assert (final.rows.trained, final.rows.validation_from) == (20, "none")


def test_the_choice_is_part_of_a_runs_identity_unless_it_is_the_default() -> None:
    options = {"model": "pocket", "task": "pocket-math", "seed": 42}
    plain, none, epoch, steps = (
        make_job("tune", {**options, **choice}).id
        for choice in ({}, {"select_checkpoint": "none"}, {"select_checkpoint": "epoch"}, {"select_checkpoint": 50})
    )
    assert plain == none
    assert len({plain, epoch, steps}) == 3


@pytest.mark.parametrize("name", ["paper-1.5b", "paper-3b", "paper-3b-ablations", "paper-7b", "paper-llama-1b"])
def test_the_papers_campaigns_choose_their_checkpoints(name: str) -> None:
    jobs = [run.job for run in plan(read_campaign(LAB / "campaigns" / f"{name}.yaml"), lambda _: None) if run.job]
    assert {job.config.scoring.select_checkpoint for job in jobs if job.kind.name == "tune"} == {"epoch"}
    assert {job.config.scoring.select_checkpoint for job in jobs if job.kind.name == "profile"} <= {"none"}


def test_samples_are_of_different_prompts() -> None:
    rows = [TokenRow(f"r{i}", [prompt, prompt, 9], 2) for i, prompt in enumerate((5, 5, 6, 5, 7))]
    assert [row.id for row in sample_rows(rows, 4)] == ["r0", "r2", "r4", "r1"]
