"""Every option of a run is a flag of ``tune`` and a key of its file, as it is where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest

from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.cli.flags import RunCommand
from frozencore.cli.foreign_flags import OURS, REASONS, counterpart
from frozencore.cli.tune import tune
from frozencore.constructors import CONSTRUCTORS
from frozencore.errors import ConfigError
from frozencore.options import COMMAND_NAMES, options_of
from frozencore.text import flag_of
from frozencore.tune.config import RunConfig, as_flags, make_config
from frozencore.tune.methods import METHODS
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from tiny import register_toy

Command = Callable[..., tuple[int, str, str]]
RUN = ("--model", "pocket", "--task", "pocket-sentiment", "--rank", "4", "--calibration-size", "16")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """The configuration that ``tune`` makes of some flags."""

    def parse(command: Command, *words: str | Path, run: tuple[str, ...] = RUN) -> RunConfig:
        found: list[RunConfig] = []
        monkeypatch.setattr("frozencore.cli.tune.tune", RunCommand(lambda config: found.append(config)))
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
        (["--fisher", "dense", "--shrinkage", "0.5"], "core", {"fisher": "dense", "shrinkage": 0.5}),
        (["--alpha", "8", "--svd-method", "full"], "core", {"alpha": 8.0, "svd_method": "full"}),
        (["--alpha", "none"], "core", {"alpha": None}),
        (["--method", "eva", "--eva-center"], "core", {"eva_center": True}),
        (["--targets", "q_proj, v_proj"], "targets", ["q_proj", "v_proj"]),
        (["--targets", "all-linear"], "targets", "all-linear"),
        (["--tokens", "completion", "--skip-first", "2"], "calibration", {"tokens": "completion", "skip_first": 2}),
        (["--weighting", "token_sum"], "calibration", {"weighting": "token_sum"}),
        (["--group-size", "5", "--stats-device", "cpu"], "calibration", {"group_size": 5, "stats_device": "cpu"}),
    ],
)  # fmt: skip
def test_a_flag_is_the_option_of_that_name(
    command: Command, given: Callable[..., RunConfig], words: list[str], group: str, options: Any
) -> None:
    assert given(command, *words).content(changed=True)[group] == options


def test_every_option_of_a_constructor_and_of_the_pass_is_a_flag_with_its_help(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [CalibrationOptions, *(row.options for row in CONSTRUCTORS.values())]
    options = {name: option for holder in holders for name, option in options_of(holder).items()}
    for verb in ("tune", "calibrate"):
        shown = " ".join(re.sub(r"[│\s]+", " ", help_of(command, verb, monkeypatch)).split())
        for name, option in options.items():
            if name == "seed":  # a run has its own
                continue
            line = shown[shown.index(f"{flag_of(COMMAND_NAMES.get(name, name))} ") :][:900]
            assert option.help in line, name
        assert all(re.search(rf"\b{name} \(\w+\)", shown) for name in METHODS)


def test_defaults_are_those_of_the_dataclasses() -> None:
    parameters = signature(tune).parameters  # type: ignore[arg-type]  # callable as typer sees it
    for holder in (CalibrationOptions, *(row.options for row in CONSTRUCTORS.values())):
        for name, option in options_of(holder).items():
            if name != "seed":  # a run has its own
                assert str(parameters[COMMAND_NAMES.get(name, name)].default) == str(option.default), name
    assert all(get_origin(parameter.annotation) is Annotated for parameter in parameters.values())
    assert get_args(parameters["eva_center"].annotation)[0] is bool


def test_a_flag_of_another_trainer_is_named_beside_ours() -> None:
    parameters = signature(tune).parameters  # type: ignore[arg-type]  # callable as typer sees it
    flags = {flag for one in parameters.values() for flag in get_args(one.annotation)[1].param_decls}
    known = flags | {flag_of(name) for name in parameters} | {"--out"}
    assert set(re.findall("--[a-z-]+", str([OURS, REASONS]))) <= known
    assert not {flag_of(name) for name in (*OURS, *REASONS)} & known
    assert counterpart("--lora-r") == "The flag --lora-r is called --rank here."
    assert counterpart("cutoff_len") == "The key cutoff_len is called max-length here."
    assert counterpart("--fp16") == "The flag --fp16 is called --dtype float16 here."
    assert counterpart("--hub-strategy") is None


FILE = """
model: pocket
task: sst2
lr: 1e-3
calibration_size: 16
targets: [q_proj, v_proj]
alpha: none
damping: [1e-2, 1]
eva-output: null
too-long: cut
exact-match: yes
select-checkpoint: 3
"""
CONFIG = make_config(
    model="pocket", task="sst2", learning_rate=1e-3, calibration_size=16, targets=("q_proj", "v_proj"),
    core={"damping": (1e-2, 1.0), "alpha": None}, too_long="cut", exact_match="yes", select_checkpoint=3,
)  # fmt: skip


@pytest.mark.parametrize("text", [FILE, as_flags(CONFIG)])
def test_a_file_of_flags_asks_for_what_the_flags_ask_for_and_the_command_line_has_the_last_word(
    text: str, command: Command, given: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert given(command, "--config", file, run=()) == CONFIG
    config = given(command, "--config", file, "--lr", "5e-3", "--model", "another", run=())
    assert config == CONFIG.replaced(learning_rate=5e-3, model="another")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    register_toy(monkeypatch)


@pytest.mark.usefixtures("as_a_user", "toy")
def test_an_option_of_a_registered_constructor_is_a_flag_with_its_help_and_trains(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for verb in ("tune", "calibrate"):
        shown = " ".join(help_of(command, verb, monkeypatch).split())
        assert re.search(r"--toy-offset .* toy: The coordinate that comes first\. \[default: 0\]", shown)
    few = ("--num-train", "8", "--num-evaluation", "8", "--epochs", "1", "--method", "toy", "--toy-offset", "3")
    assert command("tune", *RUN, *few, "--out", tmp_path / "run")[0] == 0
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["method"], record["config"]["core"]["toy_offset"]) == ("toy", 3)
    saved = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert saved["constructor_options"] == {"toy_offset": 3}


CAMPAIGN = """
name: toys
models: {pocket: pocket}
base: {rank: 4, calibration_size: 16}
studies:
  offsets:
    title: Where to begin
    axes: {model: [pocket], task: [pocket-sentiment], toy_offset: [0, 3], seed: [42]}
    fixed: {method: toy}
    report: {columns: [toy_offset]}
  searched:
    title: The best place to begin
    axes: {model: [pocket], task: [pocket-sentiment], method: [toy], seed: [42]}
    search: {grids: [{for: [toy], toy_offset: [1, 2]}]}
"""


@pytest.mark.usefixtures("as_a_user")
def test_an_option_of_a_registered_constructor_is_a_key_of_campaigns_and_of_the_schema(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "toys.yaml"
    file.write_text(CAMPAIGN)
    others = [{}, {"damping": 0.1}, {"method": "lora"}, {"method": "eva", "eva_center": True}]
    options = {"model": "pocket", "task": "pocket-sentiment", "seed": 42}
    before = [make_job("tune", options | one).id for one in others]
    with pytest.raises(ConfigError, match="no option 'toy_offset'"):
        read_campaign(file)
    assert "toy" not in command("schema")[1]
    register_toy(monkeypatch)
    tried = [run.job for run in plan(read_campaign(file), lambda _: None) if run.job]
    assert [job.config.method.core["toy_offset"] for job in tried] == [0, 3, 1, 2]
    assert len({job.id for job in tried}) == 4
    schema = json.loads(command("schema")[1])
    described = {
        "type": "integer", "minimum": 0, "maximum": 8, "default": 0,
        "description": "toy: The coordinate that comes first.",
    }  # fmt: skip
    assert schema["properties"]["base"]["properties"]["toy_offset"] == described
    axes = schema["$defs"]["Study"]["properties"]["axes"]["properties"]
    assert axes["toy_offset"] == {"type": "array", "items": described, "minItems": 1}
    assert [make_job("tune", options | one).id for one in others] == before
