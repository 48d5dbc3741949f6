"""The folder of a run: one process at a time writes into it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from frozencore.errors import ConfigError, TrainingError
from frozencore.tune.folder import locked
from frozencore.tune.many.run import execute_many
from frozencore.tune.run import execute
from small_tenants import config_of


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
