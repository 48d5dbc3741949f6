"""``--bits`` of every verb that writes cores: what is saved, scored, recorded and shown are the rounded values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fixtures import printed
from frozencore.adapter.folders import read_adapter
from frozencore.maths.quantise import default_bits
from frozencore.progress import no_progress
from frozencore.tune.pocket import pocket_model_path
from frozencore.tune.scores import score_run
from input_files import write_rows
from small_runs import adapter_in, config_of, inputs_of

Command = Callable[..., tuple[int, str, str]]
SHORT = ("--model", str(pocket_model_path()), "--epochs", 1, "--batch-size", 4, "--calibration-size", 4, "--rank", 4)


def rows_of(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        write_rows(folder / f"{name}.jsonl", [{"prompt": f"{name} {i} and", "completion": f" {i}"} for i in range(12)])
    return folder


def test_a_run_scores_and_saves_its_core_of_few_bits(tmp_path: Path) -> None:
    rows, whole, few = rows_of(tmp_path, "anna") / "anna.jsonl", tmp_path / "whole", tmp_path / "few"
    printed("tune", *SHORT, "--data", rows, "--bits", 32, "--out", whole)
    out = printed("tune", *SHORT, "--data", rows, "--bits", 2, "--out", few)
    saved, exact = read_adapter(few / "adapter"), read_adapter(whole / "adapter")
    assert torch.equal(saved.core.values, exact.core.in_bits(2, exact.ranks).values)
    num_values = len(saved.core.values)
    record = json.loads((few / "result.json").read_text())
    config = config_of(rows, batch_size=4, epochs=1, calibration_size=4)
    loss = score_run(adapter_in(few), inputs_of(config), config.scoring, no_progress).held_out_loss
    assert loss == pytest.approx(record["held_out_loss"], rel=1e-5)
    assert record["held_out_loss"] != json.loads((whole / "result.json").read_text())["held_out_loss"]
    assert record["config"]["bits"] == 2
    assert record["saved_bytes"] == (few / "adapter/adapter_model.safetensors").stat().st_size
    assert record["resources"]["saved_bytes_without_bases"] == saved.core.num_bytes
    assert f"Size of {num_values:,} trained values of 2 bits" in out
    assert "values of 2 bits" in printed("inspect", few)
    assert f"- Trained values: {num_values:,}, of 2 bits\n" in (few / "adapter/README.md").read_text()


def test_tenants_newcomers_and_sums_have_the_bits_that_are_asked_for(tmp_path: Path) -> None:
    rows, many = rows_of(tmp_path / "rows", "anna", "ben"), tmp_path / "many"
    few = ("--calibration-data", rows / "anna.jsonl", "--bits", 4)
    printed("tune-many", *SHORT, "--tenants", rows, *few, "--out", many)
    rows_of(rows, "cleo")
    printed("tune-many", *SHORT, "--tenants", rows, "--resume", "--out", many)
    cores = {name: read_adapter(many / name / "adapter").core for name in ("anna", "ben", "cleo")}
    assert [core.bits for core in cores.values()] == [4, 4, 4]
    on_it = ("--model", SHORT[1], "--epochs", 1, "--basis", many / "basis")
    more = (*on_it, "--data", rows / "anna.jsonl", "--start-from", many / "anna")
    for bits, flags in ((2, ("--bits", 2)), (default_bits(4), ())):
        printed("tune", *more, *flags, "--out", tmp_path / f"on-{bits}")
        assert read_adapter(tmp_path / f"on-{bits}/adapter").core.bits == bits
    both = [many / "anna", many / "ben"]
    assert "rounded" not in printed("merge", *both, "--bits", 32, "--out", tmp_path / "sum")
    assert "The sum is rounded to 8 bits" in printed("merge", *both, "--out", tmp_path / "small")
    exact = (cores["anna"].values + cores["ben"].values) / 2
    assert torch.equal(read_adapter(tmp_path / "sum").core.values, exact)
    small = read_adapter(tmp_path / "small")
    fewer = read_adapter(tmp_path / "sum").core.in_bits(default_bits(4), small.ranks)
    assert torch.equal(small.core.values, fewer.values)
    assert f", of {default_bits(4)} bits" in (tmp_path / "small/README.md").read_text()


def test_bits_are_of_methods_with_cores(command: Command, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "anna") / "anna.jsonl"
    lora = (*SHORT, "--method", "lora", "--data", rows, "--out", tmp_path / "run")
    for bits in (8, 4):
        status, _, err = command("tune", *lora, "--bits", bits)
        assert (status, "The method 'lora' does not read bits. Leave --bits out." in err) == (2, True), err
    printed("tune", *lora)
    assert json.loads((tmp_path / "run/result.json").read_text())["config"]["bits"] is None


def test_a_core_is_written_again_in_other_bits_without_the_scores_of_its_values(
    tmp_path: Path,
) -> None:
    rows, run = rows_of(tmp_path, "anna") / "anna.jsonl", tmp_path / "run"
    printed("tune", *SHORT, "--data", rows, "--out", run)
    for bits, flags in ((8, ()), (32, ("--bits", 32)), (2, ("--bits", 2))):
        printed("export", run, "--to", "core", *flags, "--out", tmp_path / f"{bits}")
        assert read_adapter(tmp_path / f"{bits}").core.bits == bits
        assert ("Scores:" in (tmp_path / f"{bits}/README.md").read_text()) == (bits != 2)


def test_a_run_from_a_core_warns_if_rounding_undoes_it(tmp_path: Path) -> None:
    rows, first = rows_of(tmp_path, "anna") / "anna.jsonl", tmp_path / "first"
    printed("calibrate", *SHORT[:2], *SHORT[-2:], "--data", rows, "--out", tmp_path / "shop")
    on_it = ("--model", SHORT[1], "--data", rows, "--epochs", 1, "--basis", tmp_path / "shop/basis")
    printed("tune", *on_it, "--out", first)
    further = ("tune", *on_it, "--start-from", first, "--learning-rate", 1e-5)
    warned = printed(*further, "--bits", 4, "--out", tmp_path / "few")
    assert "Rounding to 4 bits moved the core" in warned
    assert json.loads((tmp_path / "few/result.json").read_text())["warnings"][-1].startswith("Rounding to 4 bits")
    assert "Rounding to" not in printed(*further, "--bits", 32, "--out", tmp_path / "whole")
