"""One calibration, many adapters of cores alone: ``calibrate``, ``tune --basis``, ``adapter pack`` and ``unpack``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from frozencore.tune.pocket import pocket_model_path

Command = Callable[..., tuple[int, str, str]]
FEW = ["--model", pocket_model_path(), "--task", "pocket-sentiment"]
SHORT = [*FEW, "--batch-size", 8, "--accumulation", 1, "--num-train", 16, "--num-evaluation", 8, "--epochs", 1]
CORES = 16 * 4 * 4


@pytest.fixture
def basis(command: Command, tmp_path: Path) -> Path:
    calibrated = tmp_path / "calibrated"
    assert command("calibrate", *FEW, "--rank", 4, "--calibration-size", 16, "--output", calibrated)[0] == 0
    return calibrated / "basis"


def test_tune_on_a_basis_takes_everything_from_it_and_saves_cores_alone(
    command: Command, basis: Path, tmp_path: Path
) -> None:
    status, out, err = command("tune", *SHORT, "--basis", basis, "--output", tmp_path / "run")
    assert status == 0, err
    assert f"{CORES} trained values" in out
    adapter, record = tmp_path / "run" / "adapter", json.loads((tmp_path / "run" / "result.json").read_text())
    assert sum(file.stat().st_size for file in adapter.iterdir()) <= 4 * CORES + 8192
    assert (record["config"]["rank"], record["config"]["method"]) == (4, "fcca")
    assert "16 rows of pocket-sentiment" in (adapter / "README.md").read_text()
    status, out, err = command("inspect", basis, "--against", adapter, "--json")
    assert status == 0, err
    assert all(layer["angles"]["output_cosine"] == pytest.approx(1) for layer in json.loads(out).values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", 8], "has rank 4, but 8 came. Leave --rank out"),
        (["--method", "eva"], "has method fcca, but eva came. Leave --method out"),
        (["--damping", 0.5], "has damping 0.001, but 0.5 came. Leave --damping out"),
    ],
)
def test_what_contradicts_the_basis_is_one_line(
    words: list[object], message: str, command: Command, basis: Path, tmp_path: Path
) -> None:
    status, _, err = command("tune", *SHORT, "--basis", basis, *words, "--output", tmp_path / "run")
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_basis_that_is_not_there_is_one_line(command: Command, tmp_path: Path) -> None:
    status, _, err = command("tune", *SHORT, "--basis", tmp_path / "none", "--output", tmp_path / "run")
    assert status == 2
    assert "A basis is a folder with basis.json" in err
    assert err.count("\n") == 1


def test_an_adapter_is_packed_and_unpacked_to_the_same_bytes(command: Command, basis: Path, tmp_path: Path) -> None:
    whole, packed, again = basis.parent / "adapter", tmp_path / "packed", tmp_path / "again"
    status, out, err = command("adapter", "pack", whole, "--basis", basis, "--output", packed)
    assert re.search(rf"^Basis: {re.escape(str(basis))}   [\d,]+ bytes$", out, flags=re.MULTILINE), out
    assert status == 0, err
    assert f"{sum(file.stat().st_size for file in packed.iterdir()):,} bytes" in out
    assert command("adapter", "unpack", packed, "--output", again)[0] == 0
    for file in whole.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    status, _, err = command("adapter", "pack", packed, "--basis", basis, "--output", tmp_path / "twice")
    assert status == 2
    assert "cores alone already" in err
    status, _, err = command("adapter", "pack", whole, "--basis", basis, "--dtype", "int8", "--output", packed)
    assert status == 2
    assert "int8" in err


def test_the_basis_is_of_the_model_that_it_was_calibrated_on(command: Command, basis: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(pocket_model_path())
    other.model.layers[0].self_attn.q_proj.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    for file in Path(pocket_model_path()).glob("tokenizer*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    words = ["--model", tmp_path / "other", *SHORT[2:], "--basis", basis, "--output", tmp_path / "run"]
    status, _, err = command("tune", *words)
    assert status == 2
    assert "another base model" in err
