"""The folder of a campaign: what a run leaves in it when it ends, is killed or is made by somebody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frozencore.errors import ArtifactError
from frozencore.tune.record import RunRecord
from frozencore_lab.campaign.store import Store
from made_up import record_content

RUN = "0123456789abcdef"
RECORD = record_content({"task": "svamp"})


def finish(store: Store, run_id: str = RUN) -> Path:
    with store.running(run_id) as folder:
        assert folder is not None
        (folder / "result.json").write_text(json.dumps(RECORD))
    return store.runs / run_id


def test_a_finished_run_is_not_made_again(tmp_path: Path) -> None:
    made = finish(Store(tmp_path))
    then = (made / "result.json").stat().st_mtime_ns
    with Store(tmp_path).running(RUN) as folder:
        assert folder is None
    assert (made / "result.json").stat().st_mtime_ns == then


def test_what_a_killed_process_had_half_written_is_gone_from_the_finished_run(tmp_path: Path) -> None:
    """Files and folders alike: an adapter is saved as a folder."""
    store = Store(tmp_path)
    with store.running(RUN) as folder:
        assert folder is not None
        (folder / ".result.json.7.tmp").write_text("{")
        (folder / ".adapter.7.tmp").mkdir()
        (folder / ".adapter.7.tmp" / "adapter_config.json").write_text("{")
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
        assert first is not None
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
