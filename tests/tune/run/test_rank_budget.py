"""A run with a rank budget: what its record, its adapter and its basis say, and where a moments file is of no use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import PeftModel

from frozencore.errors import ConfigError
from frozencore.maths.allocation import num_values
from frozencore.tune.run.adapt import adapt_from_data
from frozencore.tune.run.calibrate_only import execute_calibration
from frozencore.tune.run.execute import execute
from frozencore.tune.run.prepare import prepare
from frozencore_lab.campaign.job import make_job
from tune.run.test_execute import config_of, silent

FEW = {"rank": 16, "rank_budget": "2KB", "targets": "all-linear", "num_train": 16, "num_evaluation": 4}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of ``frozencore calibrate --rank-budget 2KB``; only read."""
    folder = tmp_path_factory.mktemp("budget") / "calibrated"
    execute_calibration(config_of(**FEW), folder, silent)
    return folder


def test_the_record_the_adapter_and_the_screen_say_what_was_spent_where(tmp_path: Path) -> None:
    config = config_of(**FEW)
    record = execute(config, tmp_path / "run", silent)
    ranks = record.allocation.ranks
    assert record.allocation.budget == config.rank_budget == 500
    assert record.values_at_once == num_values(ranks) <= 500
    assert len(set(ranks.values())) > 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["allocation"]["ranks"] == ranks
    model = PeftModel.from_pretrained(prepare(config, silent).model, tmp_path / "run" / "adapter")
    assert model.peft_config["default"].rank_pattern == ranks
    said = f"{num_values(ranks)} trained values of a budget of 500"
    assert said in (tmp_path / "run" / "adapter" / "README.md").read_text()


def test_a_run_on_a_basis_has_the_ranks_that_its_budget_bought(calibrated: Path, tmp_path: Path) -> None:
    few = {name: FEW[name] for name in ("num_train", "num_evaluation")}
    record = execute(config_of(rank=16, basis=str(calibrated / "basis"), **few), tmp_path / "run", silent)
    own = json.loads((calibrated / "adapter" / "adapter_config.json").read_text())
    assert record.allocation.ranks == own["rank_pattern"]
    assert record.allocation.budget == own["rank_budget"] == 500
    with pytest.raises(ConfigError, match="has rank-budget 500, but 300 came. Leave --rank-budget out"):
        execute(config_of(rank=16, rank_budget=300, basis=str(calibrated / "basis"), **few), tmp_path / "other", silent)


def test_inspect_says_it_too(calibrated: Path, command: Callable) -> None:
    status, out, _ = command("inspect", calibrated / "basis", "--moments", calibrated / "moments.safetensors")
    assert status == 0
    assert "trained values of a budget of 500" in out.replace("\n", " ")


def test_a_moments_file_has_no_halves(calibrated: Path) -> None:
    config = config_of(**FEW)
    prepared = prepare(config, silent)
    with pytest.raises(ConfigError, match="a moments file holds the sum over all of them: leave --moments out"):
        adapt_from_data(config, prepared, "all-linear", silent, calibrated / "moments.safetensors")


def test_ranks_that_are_equal_anyway_take_moments_of_all_rows(tmp_path: Path) -> None:
    config = config_of(**{**FEW, "targets": ["v_proj"]}, method="eva")
    execute_calibration(config, tmp_path / "calibrated", silent)
    prepared = prepare(config, silent)
    model, found = adapt_from_data(
        config, prepared, ["v_proj"], silent, tmp_path / "calibrated" / "moments.safetensors"
    )
    assert {layer.rank for layer in found.layers.values()} == {11}  # 4 layers in 500 values
    assert model.peft_config["default"].rank_pattern == dict.fromkeys(found.layers, 11)


def test_a_budget_makes_a_run_of_its_own_however_it_is_written_and_leaves_the_ids_of_others() -> None:
    plain = {"model": "somewhere", "task": "svamp"}
    ids = [make_job("tune", {**plain, "rank_budget": size}).id for size in (500, "500", "2KB", 501)]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert make_job("tune", {**plain, "rank_budget": None}).id == make_job("tune", plain).id
