"""Every option of a run is a flag of ``tune`` and a key of its file, as it is where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
import yaml
from safetensors.torch import load_file

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.cli.flags import TakesRun, as_flags
from frozencore.cli.tune import tune
from frozencore.constructors import CONSTRUCTORS
from frozencore.files.adapter_folder import WEIGHTS_FILE
from frozencore.options import options_of
from frozencore.tune.config import RunConfig, make_config
from frozencore.tune.methods import METHODS

Command = Callable[..., tuple[int, str, str]]
RUN = ("--model", "pocket", "--task", "pocket-sentiment", "--rank", "4", "--calibration-size", "16")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """The configuration that ``tune`` makes of some flags."""

    def parse(command: Command, *words: str | Path, run: tuple[str, ...] = RUN) -> RunConfig:
        found: list[RunConfig] = []
        monkeypatch.setattr("frozencore.cli.tune.tune", TakesRun(lambda config: found.append(config)))
        status, _, errors = command("tune", *run, *words)
        assert (status, errors) == (0, "")
        return found[0]

    return parse


def help_of(command: Command, verb: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "400")
    status, out, _ = command(verb, "--help-all")
    assert status == 0
    return out


def test_without_flags_a_run_is_the_run_of_the_defaults(command: Command, given: Callable[..., RunConfig]) -> None:
    expected = make_config(model="pocket", task="pocket-sentiment", rank=4, calibration_size=16)
    assert given(command) == expected
    assert given(command).content(changed=True) == expected.content(changed=True)


@pytest.mark.parametrize(
    ("words", "group", "options"),
    [
        (["--damping", "0.1"], "core", {"damping": 0.1}),
        (["--damping", "0.1,0.01"], "core", {"damping": [0.1, 0.01]}),
        (["--damping", " 0.1 , 1 "], "core", {"damping": [0.1, 1.0]}),
        (["--fisher", "dense", "--shrinkage", "0.5"], "core", {"fisher": "dense", "shrinkage": 0.5}),
        (["--alpha", "8", "--svd-method", "full"], "core", {"alpha": 8.0, "svd_method": "full"}),
        (["--alpha", "none"], "core", {"alpha": None}),
        (["--whiten", "input", "--coordinates", "qr"], "core", {"whiten": "input", "coordinates": "qr"}),
        (["--method", "eva", "--eva-center"], "core", {"eva_center": True}),
        (["--method", "eva", "--eva-output", "random"], "core", {"eva_output": "random"}),
        (["--method", "filora", "--filora-fisher", "diagonal"], "core", {"filora_fisher": "diagonal"}),
        (["--method", "signgrad", "--initial-step", "0.5"], "core", {"initial_step": 0.5}),
        (["--tokens", "completion", "--skip-first", "2"], "calibration", {"tokens": "completion", "skip_first": 2}),
        (["--weighting", "token"], "calibration", {"weighting": "token_sum"}),
        (["--group-size", "5", "--stats-device", "cpu"], "calibration", {"group_size": 5, "stats_device": "cpu"}),
    ],
)  # fmt: skip
def test_a_flag_is_the_option_of_that_name(
    command: Command, given: Callable[..., RunConfig], words: list[str], group: str, options: dict[str, Any]
) -> None:
    assert given(command, *words).content(changed=True)[group] == options


def test_a_memory_budget_and_targets_are_read_as_they_are_meant(
    command: Command, given: Callable[..., RunConfig]
) -> None:
    config = given(command, "--memory-budget", "8GiB", "--targets", "q_proj, v_proj", "--lr", "1e-3")
    assert (config.method.calibration.memory_budget, config.method.targets, config.training.learning_rate) == (
        "8GiB",
        ("q_proj", "v_proj"),
        1e-3,
    )
    assert given(command, "--targets", "all-linear").method.targets == "all-linear"


def test_every_option_of_a_constructor_and_of_the_pass_is_a_flag_with_its_help(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [CalibrationOptions, *(row.options for row in CONSTRUCTORS.values())]
    options = {name: option for holder in holders for name, option in options_of(holder).items()}
    for verb in ("tune", "calibrate"):
        shown = " ".join(re.sub(r"[│\s]+", " ", help_of(command, verb, monkeypatch)).split())
        for name, option in options.items():
            line = shown[shown.index(f"--{name.replace('_', '-')} ") :][:900]
            assert option.help in line, name
        assert all(re.search(rf"\b{name} \(\w+\)", shown) for name in METHODS)


def test_defaults_are_those_of_the_dataclasses() -> None:
    parameters = signature(tune).parameters  # type: ignore[arg-type]  # callable as typer sees it
    for holder in (CalibrationOptions, *(row.options for row in CONSTRUCTORS.values())):
        for name, option in options_of(holder).items():
            if name != "seed":  # a run has its own
                assert str(parameters[name].default) == str(option.default), name
    assert all(get_origin(parameter.annotation) is Annotated for parameter in parameters.values())
    assert get_args(parameters["eva_center"].annotation)[0] is bool


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--damping", "-1"],
            "--damping must be a number above 0 or a list of 2, each a number above 0, but '-1' came",
        ),
        (["--damping", "1,2,3"], "--damping must be"),
        (["--damping", "much"], "--damping must be"),
        (["--memory-budget", "lots"], 'a positive size such as "8GB"'),
        (["--stats-device", "abacus"], "stats_device must be a device"),
        (["--group-size", "0"], "--group-size must be a whole number of at least 1, but '0' came"),
        (["--tokens", "all"], "--tokens must be one of nonpad, completion, nonzero_delta, but 'all' came"),
        (["--shrinkage", "2"], "--shrinkage must be a number .* but '2' came"),
        (["--eva-center"], "The method 'fcca' does not read eva_center .it is for eva."),
        (["--prompt-date", "yesterday"], "--prompt-date must be a day as YYYY-MM-DD, but 'yesterday' came"),
    ],
)
def test_what_an_option_does_not_allow_is_one_line(
    command: Command, words: list[str], message: str, tmp_path: Path
) -> None:
    for verb in ("tune", "calibrate"):
        status, _, errors = command(verb, *RUN, *words, "--out", tmp_path / "out")
        assert (status, errors.count("\n")) == (2, 1)
        assert re.search(message, errors)
    assert not (tmp_path / "out").exists()


def test_calibrate_with_a_budget_leaves_the_bases_of_one_without_and_no_sums(command: Command, tmp_path: Path) -> None:
    calibrated = ("calibrate", *RUN, "--damping", "0.1,0.01", "--num-train", "40")
    assert command(*calibrated, "--out", tmp_path / "plain", "--group-size", "3", "--stats-device", "cpu")[0] == 0
    status, out, _ = command(*calibrated, "--out", tmp_path / "thrifty", "--memory-budget", "1GiB")
    assert (status, "Moments:" in out) == (0, False)
    assert {path.name for path in (tmp_path / "thrifty").iterdir()} == {"adapter", "basis"}
    for folder in ("plain", "thrifty"):
        said = json.loads((tmp_path / folder / "adapter" / "adapter_config.json").read_text())
        assert said["damping"] == [0.1, 0.01]
    plain, thrifty = (load_file(tmp_path / folder / "adapter" / WEIGHTS_FILE) for folder in ("plain", "thrifty"))
    assert plain.keys() == thrifty.keys()
    for key, X in plain.items():
        torch.testing.assert_close(X, thrifty[key], atol=1e-3, rtol=0)
    assert (
        "already holds a calibration"
        in command(*calibrated, "--out", tmp_path / "thrifty", "--memory-budget", "1GiB")[2]
    )


FILE = """
model: pocket
task: sst2
lr: 1e-3
calibration_size: 16
targets: [q_proj, v_proj]
alpha: none
damping: [1e-2, 1]
eva-output: null
truncate: yes
prompt-date: 2025-01-31
select-checkpoint: 3
"""
CONFIG = make_config(
    model="pocket", task="sst2", learning_rate=1e-3, calibration_size=16, targets=("q_proj", "v_proj"),
    core={"damping": (1e-2, 1.0), "alpha": None}, truncate=True, prompt_date=date(2025, 1, 31), select_checkpoint=3,
)  # fmt: skip


@pytest.mark.parametrize("text", [FILE, as_flags(CONFIG), as_flags(CONFIG, {})])
def test_a_file_of_flags_asks_for_what_the_flags_ask_for_and_the_command_line_has_the_last_word(
    text: str, command: Command, given: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert given(command, "--config", file, run=()) == CONFIG
    config = given(command, "--config", file, "--lr", "5e-3", "--model", "another", run=())
    assert config == CONFIG.replaced(learning_rate=5e-3, model="another")


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
