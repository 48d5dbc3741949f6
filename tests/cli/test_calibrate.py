"""``frozencore calibrate --tenants``: one basis of rows of a folder of tenants."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from frozencore import CoreBank
from frozencore.tune.pocket import pocket_model_path
from small_tenants import adapter_in

Command = Callable[..., tuple[int, str, str]]
FEW = ["--model", pocket_model_path(), "--rank", 4, "--calibration-size", 4]


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    folder, drawn = tmp_path / "tenants", random.Random(0)
    folder.mkdir()
    for more, name in enumerate(("anna", "ben")):
        sums = [(drawn.randrange(30), drawn.randrange(30)) for _ in range(8)]
        rows = [{"prompt": f"How many is {a} and {b}?", "completion": f" {a + b + more}"} for a, b in sums]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_basis_of_tenants_carries_their_cores(command: Command, tenants: Path, tmp_path: Path) -> None:
    status, _, err = command("calibrate", *FEW, "--tenants", tenants, "--output", tmp_path / "shop")
    assert status == 0, err
    basis = tmp_path / "shop" / "basis"
    assert {path.name for path in (tmp_path / "shop").iterdir()} == {"adapter", "basis", "moments.safetensors"}
    said = json.loads((basis / "basis.json").read_text())["calibrated_on"]
    assert re.fullmatch(r"8 rows of .*tenants, \d+ tokens", said)
    short = ["--epochs", 1, "--batch-size", 4, "--basis", basis]
    status, _, err = command("tune-many", *FEW[:2], "--tenants", tenants, *short, "--output", tmp_path / "many")
    assert status == 0, err
    status, _, err = command("tune", *FEW[:2], "--data", tenants / "ben.jsonl", *short, "--output", tmp_path / "ben")
    assert status == 0, err
    assert said in (tmp_path / "ben" / "adapter" / "README.md").read_text()
    bank = CoreBank(adapter_in(tmp_path / "ben"), capacity=2)
    for name in ("anna", "ben"):
        bank.put(name, tmp_path / "many" / name / "adapter")
    assert sorted(bank) == ["anna", "ben"]


def ben_has_a_row(folder: Path) -> None:
    (folder / "ben.jsonl").write_text(json.dumps({"prompt": "How many?", "completion": " 3"}) + "\n")


def ben_says_nothing(folder: Path) -> None:
    (folder / "ben.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "completion": ""}) + "\n" for i in range(9))
    )


def leave(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (ben_has_a_row, [], "Tenant 'ben'.*needs rows to train on"),
        (ben_says_nothing, [], "Tenant 'ben'"),
        (leave, ["--method", "random"], "'random' reads no calibration data"),
        (leave, ["--data", "x.jsonl"], "--tenants and --data name the same thing. Leave one out"),
        (leave, ["--task", "sst2"], "give one"),
        (leave, ["--calibration-task", "sst2"], "leave --calibration-task out"),
    ],
)
def test_what_is_no_folder_of_tenants_is_one_line_and_writes_nothing(
    change: Callable[[Path], None], words: list[str], message: str, command: Command, tenants: Path, tmp_path: Path
) -> None:
    change(tenants)
    status, _, err = command("calibrate", *FEW, *words, "--tenants", tenants, "--output", tmp_path / "shop")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(message, err), err
    assert not (tmp_path / "shop").exists()


def test_what_a_calibration_warns_of_is_a_line_on_the_screen(command: Command, tmp_path: Path) -> None:
    rows = [{"prompt": f"How many is {a} and 3?", "completion": f" {a + 3}"} for a in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--model", pocket_model_path(), "--rank", 16, "--calibration-size", 3]
    status, out, err = command("calibrate", *named, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    assert re.search(r"Warning: \d+ of 16 layers have fewer independent directions", " ".join(out.split()))
