"""``calibrate``, what ``inspect`` shows of it, and one basis for many adapters: ``--basis``, ``adapter``, tenants."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from fixtures import printed, shown
from frozencore import CoreBank, load_basis
from frozencore.adapter.report import LayerReport
from frozencore.cli.inspect import inspection_table, layer_table
from frozencore.errors import ArtifactError
from frozencore.text import natural_sort_key
from frozencore.tune.folder import locked
from frozencore.tune.pocket import pocket_model_path
from input_files import write_rows
from small_runs import adapter_in

Command = Callable[..., tuple[int, str, str]]
FEW = ("--model", pocket_model_path(), "--task", "pocket-sentiment")
SHORT = (*FEW, "--batch-size", 8, "--accumulation", 1, "--num-train", 16, "--num-evaluation", 8, "--epochs", 1)
DAMPED = ("calibrate", *FEW, "--num-train", 40, "--rank", 4, "--calibration-size", 16, "--damping", "0.1,0.01")
CORES = 16 * 4 * 4


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a calibration, and what it printed."""
    folder = tmp_path_factory.mktemp("calibrated")
    return folder, printed(*DAMPED, "--out", folder, "--group-size", 3, "--stats-device", "cpu")


@pytest.fixture
def basis(calibrated: tuple[Path, str]) -> Path:
    return calibrated[0] / "basis"


def test_calibrate_then_inspect_shows_the_layers(command: Command, calibrated: tuple[Path, str]) -> None:
    folder, out = calibrated
    assert float(re.search(r"Calibration, ([0-9.]+) s", out)[1]) > 0  # type: ignore[index]
    assert "16 layers (--all-layers shows each)" in out
    assert {"effective", "σ₁"} <= {line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")}
    status, out, _ = command("inspect", folder / "adapter", "--json")
    reports = json.loads(out)["layers"]
    assert status == 0
    assert len(reports) == 16
    assert list(reports) == sorted(reports, key=natural_sort_key)
    status, out, _ = command("inspect", folder / "adapter")
    assert status == 0
    assert "‖R‖: norm of the core" in out
    assert "16 layers; 256 trained values" in out
    assert "PᵀP" not in out


def test_tune_on_a_basis_takes_everything_from_it_and_saves_cores_alone(
    command: Command, basis: Path, tmp_path: Path
) -> None:
    status, out, err = command("tune", *SHORT, "--basis", basis, "--out", tmp_path / "run")
    assert status == 0, err
    assert f"{CORES} trained values" in out
    adapter, record = tmp_path / "run" / "adapter", json.loads((tmp_path / "run" / "result.json").read_text())
    assert sum(file.stat().st_size for file in adapter.iterdir()) <= 4 * CORES + 8192
    assert (record["config"]["rank"], record["config"]["method"]) == (4, "fcca")
    assert "16 rows of pocket-sentiment" in (adapter / "README.md").read_text()
    ids = [json.loads(command("inspect", place, "--json")[1])["basis"] for place in (basis, adapter)]
    assert ids[0] == ids[1]


def test_fewer_rows_in_a_pass_give_the_same_basis(
    command: Command, basis: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = Qwen2ForCausalLM.forward

    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(len(kwargs["input_ids"]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", seen)
    status, _, err = command(*DAMPED, "--out", tmp_path / "shop", "--calibration-batch", 3)
    assert status == 0, err
    assert [rows for rows in passes if rows > 1] == 5 * [3]  # of 16; the learning rate is measured row by row
    here, there = (load_basis(folder).layers for folder in (basis, tmp_path / "shop" / "basis"))
    for name, layer in here.items():
        for X, Y in ((layer.P, there[name].P), (layer.Q, there[name].Q)):
            torch.testing.assert_close(X @ X.T, Y @ Y.T, rtol=1e-3, atol=1e-4)


def test_what_contradicts_the_basis_is_one_line(command: Command, basis: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    other.model.layers[0].self_attn.q_proj.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    for file in Path(pocket_model_path()).glob("tokenizer*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    for words, message in (
        (["--rank", 16], "--rank: 4, but 16 was given"),  # the default, but given
        (["--method", "eva"], "--method: fcca, but eva was given"),
        (["--damping", 0.001], "--damping: (0.1, 0.01), but 0.001 was given"),
        (["--model", tmp_path / "other"], "another base model"),
    ):
        status, _, err = command("tune", *SHORT, "--basis", basis, *words, "--out", tmp_path / "run")
        assert (status, err.count("\n")) == (2, 1)
        assert message in err
        assert not (tmp_path / "run").exists()


def write_sums(file: Path, more: int, num_rows: int = 8) -> Path:
    drawn = random.Random(more)
    sums = [(drawn.randrange(30), drawn.randrange(30)) for _ in range(num_rows)]
    rows = [{"prompt": f"How many is {a} and {b}?", "completion": f" {a + b + more}"} for a, b in sums]
    return write_rows(file, rows)


def test_a_basis_of_tenants_carries_their_cores(command: Command, tmp_path: Path) -> None:
    tmp_path = tmp_path / "a shop"
    tenants, basis = tmp_path / "tenants", tmp_path / "shop" / "basis"
    tenants.mkdir(parents=True)
    for more, name in enumerate(("anna", "ben")):
        write_sums(tenants / f"{name}.jsonl", more)
    few = ("--rank", 4, "--calibration-size", 4)
    status, out, err = command("calibrate", *FEW[:2], *few, "--tenants", tenants, "--out", tmp_path / "shop")
    assert status == 0, err
    assert f"Next: frozencore tune-many --tenants '{tenants}' --model {FEW[1]} --basis '{basis}' --out OUT\n" in out
    assert {path.name for path in (tmp_path / "shop").iterdir()} == {"adapter", "basis"}
    said = json.loads((basis / "basis.json").read_text())["calibrated_on"]
    assert re.fullmatch(r"4 rows of .*tenants, \d+ tokens", said)
    again = command("calibrate", *FEW[:2], *few, "--tenants", tenants, "--out", tmp_path / "shop")
    assert (again[0], again[2].count("\n")) == (2, 1)
    assert "already holds an adapter" in again[2]
    wrong = command(
        "tune", *FEW[:2], "--data", tenants / "ben.jsonl", "--basis", tmp_path / "shop", "--out", tmp_path / "ben"
    )
    assert (wrong[0], wrong[2].count("\n")) == (2, 1)
    assert f"Did you mean {basis}?" in wrong[2]
    short = ["--epochs", 1, "--batch-size", 4, "--basis", basis]
    status, out, err = command("tune-many", *FEW[:2], "--tenants", tenants, *short, "--out", tmp_path / "many")
    assert status == 0, err
    assert f"Next: frozencore chat '{tmp_path / 'many' / 'anna'}' --with-base\n" in out
    status, _, err = command("tune", *FEW[:2], "--data", tenants / "ben.jsonl", *short, "--out", tmp_path / "ben")
    assert status == 0, err
    assert said in (tmp_path / "ben" / "adapter" / "README.md").read_text()
    bank = CoreBank(adapter_in(tmp_path / "ben"), capacity=2)
    for name in ("anna", "ben"):
        bank.put(name, tmp_path / "many" / name / "adapter")
    assert sorted(bank) == ["anna", "ben"]


def test_what_a_calibration_warns_of_is_a_line_on_the_screen(command: Command, tmp_path: Path) -> None:
    rows = write_sums(tmp_path / "rows.jsonl", 0, num_rows=4)
    few = ("--rank", 16, "--calibration-size", 3)
    status, out, err = command("calibrate", *FEW[:2], *few, "--data", rows, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    assert re.search(r"Warning: \d+ of 16 layers have fewer independent directions", " ".join(out.split()))


def test_a_folder_is_said_to_hold_what_the_commands_wrote(
    command: Command, calibrated: tuple[Path, str], tmp_path: Path
) -> None:
    status, out, err = command("inspect", calibrated[0])
    assert (status, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()[:2]] == [
        str(calibrated[0] / name) for name in ("adapter", "basis")
    ]
    assert "‖R‖" in out
    run = tmp_path / "runs" / "[red]first"
    (run / "checkpoints").mkdir(parents=True)
    (run / "result.json").write_text("{")
    status, out, err = command("inspect", run)  # no adapter, so that is all
    assert (status, err, out.count("\n")) == (0, "", 2)
    assert "[red]first/result.json: a record, but not of a run, or damaged\n" in out
    assert "with --resume continues" in out
    assert command("inspect", run.parent)[1] == f"{run.parent}: 1 folder with a record: [red]first\n"


BASIS = LayerReport((8, 6), 2, 4, 112, 3e-8, 0.75)


def test_an_inspection_is_a_line_a_quantity_unless_every_layer_is_asked_for() -> None:
    reports = {f"layer.{i}": replace(BASIS, core_norm=float(i)) for i in range(120)}
    short, long = (shown(inspection_table(reports, every_layer=every)) for every in (False, True))
    assert len(short.splitlines()) < 20
    assert "120 layers (--all-layers shows each)" in short
    cells = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:6]] for line in short.splitlines()
             if line.startswith("│")}  # fmt: skip
    assert cells["‖R‖"] == ["0", "59.5", "119", ""]  # no norm of a core is worse than another
    assert all(f" {name} " in long for name in reports)
    assert "8 x 6" in long
    assert shown(layer_table("Calibration", ["a", "b"], {"tokens": [1573, 1573]})).count("1,573") == 3
    outliers = shown(layer_table("Calibration", list(reports), {"max/med a": [1.0 + i for i in range(120)]}))
    assert "layer.119" in outliers  # where the most energy stands in few channels


def test_the_worst_layer_decides_what_is_said_of_orthonormality() -> None:
    reports = {"a": BASIS, "b": replace(BASIS, orthonormality_error=1e-3)}
    assert "|PᵀP - I| 1.0e-03" in shown(inspection_table(reports))
    assert "PᵀP" not in shown(inspection_table(reports, orthonormal=False))  # the default coordinates promise none


def test_two_calibrations_do_not_write_into_one_folder(command: Command, tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        status, _, error = command(*DAMPED, "--out", tmp_path / "out")
    assert (status, error.count("\n")) == (2, 1)
    assert "another process is running in" in error
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ArtifactError("basis cannot be written: No space left.")])
def test_a_calibration_that_is_stopped_between_its_two_folders_leaves_none(
    stop: BaseException, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        assert (tmp_path / "out" / "adapter").is_dir()
        raise stop

    monkeypatch.setattr("frozencore.tune.calibrate_only.save_basis", stopped)
    few = (*FEW, "--num-train", 4, "--rank", 2, "--calibration-size", 4, "--targets", "q_proj")
    assert command("calibrate", *few, "--out", tmp_path / "out")[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--bits=4", "--select-by=accuracy", "--max-new-tokens=9"])
def test_a_calibration_takes_no_option_that_it_would_not_read(flag: str, command: Command, tmp_path: Path) -> None:
    status, _, error = command(*DAMPED, flag, "--out", tmp_path / "out")
    assert (status, flag.partition("=")[0] in error) == (2, True)
