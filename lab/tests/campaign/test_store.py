"""The folder of a campaign: what a run leaves in it however it ends; and the ids of committed runs, which stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frozencore.errors import ArtifactError
from frozencore.tune.record import RunRecord, TunedRecord
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.shared_moments import moments_key
from frozencore_lab.campaign.spec import read_campaign
from frozencore_lab.campaign.store import Store
from small_runs import record_content

RUN = "0123456789abcdef"
RECORD = record_content({"task": "svamp"})


def finish(store: Store, run_id: str = RUN) -> Path:
    with store.running(run_id) as folder:
        (folder / "result.json").write_text(json.dumps(RECORD))
    return store.runs / run_id


def test_what_a_killed_process_had_half_written_is_gone_from_the_finished_run(tmp_path: Path) -> None:
    """Files and folders alike, as an adapter is; and the work of a run that was killed while it removed it."""
    store = Store(tmp_path)
    with store.running(RUN) as folder:
        (folder / "checkpoints").mkdir()
        (folder / "inputs.json").write_text("{}")
        (folder / ".result.json.0123abcd.tmp").write_text("{")
        (folder / ".adapter.0123abcd.tmp").mkdir()
        (folder / ".adapter.0123abcd.tmp" / "adapter_config.json").write_text("{")
    assert [path.name for path in finish(store).iterdir()] == ["result.json"]


def test_a_runs_folder_without_its_result_is_refused_and_left_alone(tmp_path: Path) -> None:
    made = finish(Store(tmp_path))
    (made / "result.json").rename(made / "result.json.lost")
    with (
        pytest.raises(ArtifactError, match=f"{RUN} holds no result.json. Remove it and the run is made again."),
        Store(tmp_path).running(RUN),
    ):
        pytest.fail("it must not begin")
    assert [path.name for path in made.iterdir()] == ["result.json.lost"]


def test_a_run_that_ends_without_a_result_keeps_its_folder_for_the_next_try(tmp_path: Path) -> None:
    with Store(tmp_path).running(RUN) as first:
        (first / "log.txt").write_text("train 3/10\n")
    assert Store(tmp_path).outcome(RUN) is None
    assert not (tmp_path / "runs" / RUN).exists()
    with Store(tmp_path).running(RUN) as second:
        assert second == first
        assert (second / "log.txt").read_text() == "train 3/10\n"


def test_a_result_whose_process_was_killed_before_the_renaming_counts(tmp_path: Path) -> None:
    partial = tmp_path / "runs" / f".{RUN}.partial"
    partial.mkdir(parents=True)
    (partial / "result.json").write_text(json.dumps(RECORD))
    with Store(tmp_path).running(RUN) as folder:
        assert folder is None
    outcome = Store(tmp_path).outcome(RUN)
    assert isinstance(outcome, RunRecord)
    assert outcome.content() == RECORD | {"run_id": RUN}
    assert not partial.exists()


def test_running_are_the_runs_that_somebody_makes_now_not_those_that_were_killed(tmp_path: Path) -> None:
    store, killed = Store(tmp_path), "f" * 16
    finish(store, "1" * 16)
    with store.running(killed):
        pass
    assert store.running_now() == []
    with store.running(RUN):
        assert Store(tmp_path).running_now() == [RUN]
    assert store.running_now() == []


@pytest.mark.parametrize("line", ['{"run_id": "1234567890abcdef", "fo', '{"format": 99, "run_id": "1234567890abcdef"}'])
def test_a_line_that_cannot_be_read_stays_unless_its_run_is_there(line: str, tmp_path: Path) -> None:
    """The record of a run that another machine made: rebuilding the file would lose it."""
    store = Store(tmp_path)
    finish(store)
    store.write_index()
    file = tmp_path / "records.jsonl"
    file.write_text(f"{line}\n{file.read_text()}")
    before = file.read_bytes()
    with pytest.raises(ArtifactError, match="line 1 is damaged or of a newer frozencore"):
        Store(tmp_path).write_index()
    assert file.read_bytes() == before
    file.write_text(f'{{"run_id": "{RUN}", "cut"')
    Store(tmp_path).write_index()
    assert json.loads(file.read_text())["run_id"] == RUN


def test_two_records_of_one_run_that_differ_are_refused_and_equal_ones_are_one(tmp_path: Path) -> None:
    """As after ``cat`` of the files of two machines that both made the run."""
    record = {**RECORD, "run_id": RUN}
    file = tmp_path / "records.jsonl"
    file.write_text(f"{json.dumps(record)}\n" * 2)
    assert isinstance(Store(tmp_path).outcome(RUN), TunedRecord)
    file.write_text(f"{json.dumps(record)}\n{json.dumps({**record, 'accuracy': 0.99})}\n")
    with pytest.raises(ArtifactError, match=f"two records of run {RUN} that differ"):
        Store(tmp_path).outcome(RUN)


LAB = Path(__file__).parents[2]
RESULTS = sorted(folder.name for folder in (LAB / "results").iterdir())


@pytest.mark.parametrize("name", RESULTS)
def test_every_run_of_the_specification_has_its_record_and_every_record_its_run(name: str) -> None:
    store, campaign = Store(LAB / "results" / name), read_campaign(LAB / "campaigns" / f"{name}.yaml")
    assert store.campaign() == campaign
    asked_for = {run.job.id if run.job else run.blocked for run in plan(campaign, store.outcome)}
    lines = (store.folder / "records.jsonl").read_text().splitlines()
    made = {json.loads(line)["run_id"] for line in lines}
    assert asked_for == made


@pytest.mark.parametrize("name", RESULTS)
def test_a_record_says_what_its_run_was_asked_for(name: str) -> None:
    """The recipe that was trained with, beside the id that its configuration has today."""
    store = Store(LAB / "results" / name)
    for run in plan(store.campaign(), store.outcome):
        record = store.outcome(run.job.id)
        assert isinstance(record, RunRecord)
        if isinstance(record, TunedRecord):  # a stability run trains nothing
            recipe, training, entry = record.resolved.recipe, run.job.config.training, run.job.config.method.entry
            said = recipe["learning_rate"], recipe["warmup"]
            assert said == (training.rate_of(entry), training.warmup_of(entry))


@pytest.mark.parametrize(
    ("options", "run_id", "moments"),
    [
        ({"damping": 0.1}, "1aef13050e2d7b1f", "66c08e1dadb6c686"),
        ({"damping": 1}, "b0cfd0b538fdba62", "66c08e1dadb6c686"),
        ({"skip_first": 2}, "c11cb69ea013aecc", "277c56fae84cf885"),
        ({"alpha": 3}, "d4038c1c6031cfa5", "66c08e1dadb6c686"),
        ({"targets": ["q_proj", "v_proj"]}, "d99fd8a8f8a8be9d", "ca86b2c6e63d3c73"),
        ({"coordinates": "raw", "svd_method": "full"}, "9f992f91adc9963c", "66c08e1dadb6c686"),
        ({"fisher": "dense", "shrinkage": 1, "whiten": "input"}, "dbcb0744cd2c5b52", "66c08e1dadb6c686"),
        ({"method": "eva", "eva_center": True, "eva_output": "random"}, "2c37508d410fedf6", "66c08e1dadb6c686"),
        ({"method": "signgrad", "initial_step": 0.1}, "e150e4315ec0e692", "66c08e1dadb6c686"),
        ({"method": "filora", "filora_fisher": "diagonal"}, "1c714b74a93a0e89", "66c08e1dadb6c686"),
        ({"calibration_task": "pocket-sentiment"}, "c4cad727ab014207", "506614adf629ca65"),
        ({"tokens": "nonzero_delta"}, "71d2f5cdcb26b44f", "1beb336108398f58"),
    ],
)
def test_every_option_keeps_the_ids_and_the_moments_of_its_runs(
    options: dict[str, Any], run_id: str, moments: str
) -> None:
    papers = {"coordinates": "qr", "alpha": None, "learning_rate": 5e-3, "warmup": 0.03}
    job = make_job("tune", {"model": "pocket", "task": "pocket-math", "seed": 42, **papers, **options})
    assert (job.id, moments_key(job.config)) == (run_id, moments)
