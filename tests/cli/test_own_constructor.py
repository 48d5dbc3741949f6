"""A constructor of a user's own, registered: what the lab and the command line then know of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from frozencore.errors import ConfigError
from frozencore.tune.config import make_config
from frozencore_lab.campaign.job import make_job
from frozencore_lab.campaign.plan import plan
from frozencore_lab.campaign.spec import read_campaign
from toy import register_toy

pytestmark = pytest.mark.usefixtures("as_a_user")
Command = Callable[..., tuple[int, str, str]]
OPTIONS = {"model": "pocket", "task": "pocket-sentiment", "seed": 42}
SPECIFICATION = """
name: toys
models: {pocket: pocket}
base: {rank: 4, calibration_size: 16}
studies:
  offsets:
    title: Where to begin
    axes: {model: [pocket], task: [pocket-sentiment], toy_offset: [0, 3], seed: [42]}
    fixed: {method: METHOD}
    report: {columns: [toy_offset]}
  searched:
    title: The best place to begin
    axes: {model: [pocket], task: [pocket-sentiment], method: [METHOD], seed: [42]}
    search: {grids: [{for: [METHOD], toy_offset: [1, 2]}]}
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    register_toy(monkeypatch)


def specification(tmp_path: Path, method: str = "toy") -> Path:
    file = tmp_path / "toys.yaml"
    file.write_text(SPECIFICATION.replace("METHOD", method))
    return file


@pytest.mark.usefixtures("toy")
def test_its_option_is_a_flag_with_its_help(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("tune", "calibrate"):
        status, out, _ = command(verb, "--help-all")
        assert status == 0
        line = next(line for line in out.splitlines() if "--toy-offset" in line)
        assert "toy: The coordinate that comes first. [default: 0]" in line
        assert "vera, toy" in " ".join(out.split()) or ", toy," in out


@pytest.mark.usefixtures("toy")
def test_it_is_trained_by_tune(command: Command, tmp_path: Path) -> None:
    few = ("--num-train", "8", "--num-evaluation", "8", "--epochs", "1", "--batch-size", "8", "--accumulation", "1")
    words = ("--model", "pocket", "--task", "pocket-sentiment", "--rank", "4", "--method", "toy", "--toy-offset", "3")
    status, _, errors = command("tune", *words, *few, "--out", tmp_path / "run")
    assert (status, errors) == (0, "")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["method"], record["config"]["core"]["toy_offset"]) == ("toy", 3)
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["toy_offset"] == 3


@pytest.mark.usefixtures("toy")
def test_its_option_is_a_key_of_a_campaign_as_axis_and_in_a_search(tmp_path: Path) -> None:
    planned = plan(read_campaign(specification(tmp_path)), lambda _: None)
    tried = [run.job.config.method.core["toy_offset"] for run in planned if run.job]
    assert tried == [0, 3, 1, 2]
    assert len({run.job.id for run in planned if run.job}) == 4


@pytest.mark.usefixtures("toy")
def test_its_option_is_in_the_schema(command: Command) -> None:
    status, out, _ = command("schema")
    schema = json.loads(out)
    assert status == 0
    described = schema["properties"]["base"]["properties"]["toy_offset"]
    assert described == {
        "type": "integer", "minimum": 0, "maximum": 8, "default": 0,
        "description": "toy: The coordinate that comes first.",
    }  # fmt: skip
    axes = schema["$defs"]["Study"]["properties"]["axes"]["properties"]
    assert axes["toy_offset"] == {"type": "array", "items": described, "minItems": 1}


@pytest.mark.usefixtures("toy")
def test_its_option_is_refused_for_every_other_method(tmp_path: Path, command: Command) -> None:
    with pytest.raises(ConfigError, match=r"Study 'offsets': .*'rawgrad' does not read toy_offset .it is for toy"):
        plan(read_campaign(specification(tmp_path, "rawgrad")), lambda _: None)
    words = ("--model", "pocket", "--task", "pocket-sentiment", "--out", tmp_path / "x", "--toy-offset", "1")
    for method in ("fcca", "lora"):
        status, _, errors = command("tune", *words, "--method", method)
        assert (status, f"'{method}' does not read toy_offset (it is for toy)" in errors) == (2, True)
        with pytest.raises(ConfigError, match="does not read toy_offset"):
            make_config(**OPTIONS, method=method, core={"toy_offset": 1})
    with pytest.raises(ConfigError, match="toy_offset must be a whole number from 0 to 8, but 9 came"):
        make_job("tune", {**OPTIONS, "method": "toy", "toy_offset": 9})


def test_without_the_row_nothing_knows_it(tmp_path: Path, command: Command) -> None:
    with pytest.raises(ConfigError, match="no option 'toy_offset'"):
        read_campaign(specification(tmp_path))
    assert "toy" not in command("schema")[1]
    assert "toy" not in command("tune", "--help")[1]


def test_runs_of_the_others_keep_their_ids_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        {},
        {"damping": 0.1},
        {"method": "lora"},
        {"method": "eva", "eva_center": True},
        {"tokens": "completion"},
    ]
    before = [make_job("tune", OPTIONS | one).id for one in options]
    register_toy(monkeypatch)
    assert [make_job("tune", OPTIONS | one).id for one in options] == before
