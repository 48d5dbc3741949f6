"""The folder of a run: one process at a time writes into it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from frozencore.errors import ArtifactError, ConfigError, TrainingError
from frozencore.files.names import ADAPTER, BASIS
from frozencore.tune.calibrate_only import execute_calibration
from frozencore.tune.folder import RECORD, begin, locked, refuse_used, require_new
from frozencore.tune.many.run import execute_many
from frozencore.tune.run import execute
from small_runs import config_of

BEGUN = json.dumps({"model": 64 * "0"})
"""The ``inputs.json`` of a run that has begun."""


def fail(stage: str, *_: object) -> None:
    raise AssertionError(f"{stage}: before any work is done it is clear that the folder is in use")


@pytest.mark.parametrize("run", [execute, execute_many])
def test_a_second_run_into_a_folder_is_refused_before_any_work(run: Callable[..., object], tmp_path: Path) -> None:
    (tmp_path / "tenants").mkdir()
    file = tmp_path / "tenants" / "anna.jsonl"
    file.write_text("".join(json.dumps({"text": f"Tom has {i} cats."}) + "\n" for i in range(9)))
    config = config_of(file.parent if run is execute_many else file)
    out = tmp_path / "out"
    out.mkdir()
    other = os.open(out, os.O_RDONLY)  # another process's
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(TrainingError, match="another process is running in .*out") as caught:
        run(config, out, fail)
    assert "\n" not in str(caught.value)
    assert list(out.iterdir()) == []
    os.close(other)


def test_a_block_that_fails_leaves_no_empty_folder_and_no_lock(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with pytest.raises(ConfigError), locked(out):
        raise ConfigError("bad input")
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with locked(out):
            (out / "file").touch()
    with pytest.raises(ConfigError), locked(out):
        raise ConfigError("bad input")
    assert (out / "file").exists()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter/adapter_config.json", "an adapter"),
        ("start/notes.txt", "start"),
        ("predictions.jsonl", "predictions.jsonl"),
        ("inputs.json", "inputs.json"),
    ],
)
def test_a_run_replaces_no_file_of_a_calibration_or_of_the_user(
    name: str, content: str, resume: bool, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ArtifactError, match=f"already holds {content}"):
        execute(config_of(tmp_path / "rows.jsonl"), tmp_path, fail, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("content", ["{}", "[]", "rows: 9", '{"model": "mine"}'])
def test_an_inputs_file_of_the_user_does_not_make_a_folder_that_of_a_run(
    content: str, resume: bool, tmp_path: Path
) -> None:
    (tmp_path / "inputs.json").write_text(content)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ArtifactError, match="already holds checkpoints"):
        execute(config_of(tmp_path / "rows.jsonl"), tmp_path, fail, resume=resume)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "inputs.json"]


def test_a_run_does_not_replace_the_options_that_a_user_wrote_into_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rank: 4  # mine")
    with pytest.raises(ArtifactError, match=r"already holds run\.yaml"):
        execute(config_of(tmp_path / "rows.jsonl"), tmp_path, fail)


@pytest.mark.parametrize("names", [(RECORD,), (RECORD, ADAPTER, BASIS)], ids=["evaluate", "calibrate"])
def test_nothing_else_is_written_into_the_folder_of_an_interrupted_run(names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "base-score.json").write_text("{}")
    with pytest.raises(TrainingError, match="interrupted run"):
        require_new(tmp_path, *names)


def test_a_run_that_was_stopped_in_its_last_clean_up_is_finished_and_resuming_removes_the_rest(tmp_path: Path) -> None:
    for name, content in (("result.json", "{}"), ("inputs.json", BEGUN), ("base-score.json", "{}")):
        (tmp_path / name).write_text(content)
    with pytest.raises(ArtifactError, match="already holds a finished run"):
        execute(config_of(tmp_path / "rows.jsonl"), tmp_path, fail)
    assert (tmp_path / "base-score.json").exists()
    with pytest.raises(ArtifactError, match="holds a finished run: there is nothing to resume"):
        execute(config_of(tmp_path / "rows.jsonl"), tmp_path, fail, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("stopped_at", ["write_json", "write_text"])
def test_a_run_that_was_stopped_while_it_wrote_its_options_begins_again_in_its_folder(
    stopped_at: str, resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    config, hashes = config_of(tmp_path / "rows.jsonl"), json.loads(BEGUN)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patched.setattr(f"frozencore.tune.folder.{stopped_at}", stop)
        begin(tmp_path / "out", config, hashes, resume=False)
    refuse_used(tmp_path / "out", resume=resume)
    begin(tmp_path / "out", config, hashes, resume=resume)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["inputs.json", "run.yaml"]


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (execute, ("adapter", "start", "predictions.jsonl", "run.yaml", "inputs.json", "result.json")),
        (execute_calibration, ("adapter", "basis")),
    ],
)
def test_the_temporary_files_of_a_killed_run_are_removed_by_the_next(
    run: Callable[..., object], names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / f".{name}.0123abcd.tmp").mkdir()
    (tmp_path / ".export.0123abcd.tmp").touch()  # of another writer, which may be at work
    with pytest.raises(AssertionError, match="load"):
        run(config_of(tmp_path / "no-rows.jsonl"), tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".export.0123abcd.tmp"]
