"""A file of flags asks for what the flags ask for, and the command line has the last word."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import yaml

from frozencore.cli.flags import TakesRun, as_flags
from frozencore.tune.config import RunConfig, make_config

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RunConfig]:
    """The configuration that ``tune`` makes of a file and further words."""

    def parse(text: str, *words: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text(text)
        found: list[RunConfig] = []
        monkeypatch.setattr("frozencore.cli.tune.tune", TakesRun(lambda config: found.append(config)))
        status, _, errors = command("tune", "--config", tmp_path / "run.yaml", *words)
        assert (status, errors) == (0, "")
        return found[0]

    return parse


FILE = """
model: pocket
task: sst2
lr: 1e-3
calibration_size: 16
targets: [q_proj, v_proj]
damping: [1e-2, 1]
eva-output: null
truncate: yes
prompt-date: 2025-01-31
select-checkpoint: 3
"""
CONFIG = make_config(
    model="pocket", task="sst2", learning_rate=1e-3, calibration_size=16, targets=("q_proj", "v_proj"),
    core={"damping": (1e-2, 1.0)}, truncate=True, prompt_date=date(2025, 1, 31), select_checkpoint=3,
)  # fmt: skip


def test_a_file_of_flags_asks_for_what_the_flags_ask_for(asked: Callable[..., RunConfig]) -> None:
    assert asked(FILE) == CONFIG


def test_the_command_line_has_the_last_word(asked: Callable[..., RunConfig]) -> None:
    config = asked(FILE, "--lr", "5e-3", "--model", "another")
    assert config == CONFIG.replaced(learning_rate=5e-3, model="another")


@pytest.mark.parametrize("dumped", [{}, {"changed": True}])
def test_what_is_written_asks_for_the_same_again(asked: Callable[..., RunConfig], dumped: dict[str, bool]) -> None:
    assert asked(as_flags(CONFIG, **dumped)) == CONFIG
    assert asked(as_flags(asked(as_flags(CONFIG)))) == CONFIG


def test_a_run_writes_the_file_that_asks_for_it_again_and_a_file_may_name_its_folder(
    command: Command, tmp_path: Path
) -> None:
    few = {
        "model": "pocket", "task": "pocket-sentiment", "num-train": 8, "num-evaluation": 8, "epochs": 1, "rank": 4,
        "calibration-size": 8, "device": "cpu", "output": str(tmp_path / "first"),
    }  # fmt: skip
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(few))
    assert command("tune", "--config", tmp_path / "few.yaml")[0] == 0
    written = tmp_path / "first" / "run.yaml"
    assert yaml.safe_load(written.read_text()).items() >= {"rank": 4, "batch-size": "auto", "accumulation": 8}.items()
    assert command("tune", "--config", written, "--out", tmp_path / "second")[0] == 0
    first, second = (tmp_path / run / "adapter" / "adapter_model.safetensors" for run in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modl: pocket", "run.yaml has the key 'modl', which `tune` does not know. Did you mean model?"),
        ("zzz: 1", "has the key 'zzz', which `tune` does not know. See `frozencore tune --help`."),
        ("lr: 1\nlearning-rate: 2", "gives learning-rate twice, by its two names"),
        ("model: {name: pocket}", "run.yaml, model: a value is a number, a word, yes or no, or a list of such"),
        ("- model", "must hold flags as `rank: 8`, a line each"),
        ("rank: 2\nrank: 3", "the key 'rank' is given twice"),
        ("config: other.yaml", "has the key 'config'"),
    ],
)
def test_what_is_no_flag_is_one_line(command: Command, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    status, _, errors = command("tune", "--config", tmp_path / "run.yaml", "--out", tmp_path / "run")
    assert (status, errors.count("\n")) == (2, 1)
    assert said in errors
    assert not (tmp_path / "run").exists()
