"""``frozencore calibrate --tenants``: one basis for a folder of tenants, and what it holds of each."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frozencore import CoreBank, frozen_core_layers, load_basis
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


def test_a_basis_of_tenants_says_what_it_holds_of_each_and_carries_their_cores(
    command: Command, tenants: Path, tmp_path: Path
) -> None:
    status, out, err = command("calibrate", *FEW, "--tenants", tenants, "--output", tmp_path / "shop")
    assert status == 0, err
    assert "How well the basis fits 2 tenants" in out
    assert all(re.search(rf"{name} .*%.*%.*%", out) for name in ("anna", "ben", "mean"))
    assert "Moments:" not in out
    basis = tmp_path / "shop" / "basis"
    assert {path.name for path in (tmp_path / "shop").iterdir()} == {"adapter", "basis"}
    assert re.fullmatch(
        r"2 groups of 4 rows each, \d+ tokens", json.loads((basis / "basis.json").read_text())["calibrated_on"]
    )
    short = ["--epochs", 1, "--batch-size", 4, "--basis", basis]
    status, _, err = command("tune-many", *FEW[:2], "--tenants", tenants, *short, "--output", tmp_path / "many")
    assert status == 0, err
    status, _, err = command("tune", *FEW[:2], "--data", tenants / "ben.jsonl", *short, "--output", tmp_path / "ben")
    assert status == 0, err
    assert "2 groups of 4 rows each" in (tmp_path / "ben" / "adapter" / "README.md").read_text()
    bank = CoreBank(adapter_in(tmp_path / "ben"), capacity=2)
    for name in ("anna", "ben"):
        bank.put(name, tmp_path / "many" / name / "adapter")
    assert sorted(bank) == ["anna", "ben"]


def in_one_file(tenants: Path, *more: dict) -> Path:
    """All rows in one file, with the name of the tenant as a column."""
    rows = [
        json.loads(line) | {"who": file.stem} for file in tenants.iterdir() for line in file.read_text().splitlines()
    ]
    (tenants.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows, *more)))
    return tenants.parent / "rows.jsonl"


def test_the_values_of_a_column_are_groups(command: Command, tenants: Path, tmp_path: Path) -> None:
    words = [*FEW, "--data", in_one_file(tenants), "--group-by", "who"]
    status, out, err = command("calibrate", *words, "--output", tmp_path / "shop")
    assert status == 0, err
    assert all(re.search(rf"{name} .*%.*%.*%", out) for name in ("anna", "ben", "mean"))
    calibrated_on = json.loads((tmp_path / "shop" / "basis" / "basis.json").read_text())["calibrated_on"]
    assert re.fullmatch(r"2 groups of 4 rows each, \d+ tokens", calibrated_on)
    assert not (tmp_path / "shop" / "moments.safetensors").exists()


def test_long_values_of_a_column_that_begin_alike_are_different_groups(
    command: Command, tenants: Path, tmp_path: Path
) -> None:
    for file in list(tenants.iterdir()):
        file.rename(tenants / f"{'customer of the shop ' * 4}{file.name}")
    words = [*FEW, "--data", in_one_file(tenants), "--group-by", "who"]
    status, _, err = command("calibrate", *words, "--output", tmp_path / "shop")
    assert status == 0, err
    assert "2 groups of" in json.loads((tmp_path / "shop" / "basis" / "basis.json").read_text())["calibrated_on"]


@pytest.mark.parametrize(
    ("more", "words", "message"),
    [
        (
            (),
            ["--group-by", "whose"],
            "column 'whose' of every row, but row 1 of .* has none. Its columns are: prompt,",
        ),
        (({"prompt": "1?", "completion": " 1"},), ["--group-by", "who"], "but row 17 of .* has none"),
        ((), ["--group-by", "kind"], "column 'kind' .*has none"),
        ((), ["--group-by", "prompt", "--columns", "prompt=prompt"], "2 rows at least, but 'How many is"),
        (({"prompt": "1?", "completion": " 1", "who": "cleo"},), ["--group-by", "who"], "2 rows at least, but 'cleo'"),
        (
            ({"prompt": "1?", "completion": "", "who": "cleo"},) * 2,
            ["--group-by", "who"],
            "row-17: column 'completion' must hold text",
        ),
        ((), ["--group-by", "who", "--calibration-size", 1], "2 rows at least, but 'anna' has 1"),
        ((), ["--group-by", "who", "--grow", "basis"], "--grow came too. Leave one out"),
        ((), ["--group-by", "who", "--method", "eva"], "'eva' here reads others. Use fcca"),
    ],
)
def test_a_column_that_makes_no_groups_is_one_line_and_writes_nothing(
    more: tuple[dict, ...], words: list[str], message: str, command: Command, tenants: Path, tmp_path: Path
) -> None:
    data = ["--data", in_one_file(tenants, *more)]
    status, _, err = command("calibrate", *FEW, *data, *words, "--output", tmp_path / "shop")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(message, err), err
    assert not (tmp_path / "shop").exists()


def test_one_value_alone_or_no_file_of_rows_makes_no_groups(command: Command, tenants: Path, tmp_path: Path) -> None:
    by = ["--group-by", "who", "--output", tmp_path / "shop"]
    (tenants / "ben.jsonl").unlink()
    alone = in_one_file(tenants)
    for words, message in (
        (["--data", alone], "two at least, but the column 'who' of .* holds only 'anna'. Leave --group-by out"),
        (["--task", "pocket-math"], "file of rows, given once as --data, but --task pocket-math came"),
        (["--data", alone, "--packing"], "file of rows, given once as --data, but --packing came"),
        (["--tenants", tenants], "--tenants came too. Leave one out"),
    ):
        status, _, err = command("calibrate", *FEW, *words, *by)
        assert (status, err.count("\n")) == (2, 1)
        assert re.search(message, err), err


def test_several_calibration_tasks_are_groups_of_a_run_and_no_folder_of_moments(
    command: Command, tenants: Path, tmp_path: Path
) -> None:
    two = ["--calibration-task", "pocket-math", "--calibration-task", "pocket-sentiment"]
    status, _, err = command("calibrate", *FEW, *two, "--task", "pocket-math", "--output", tmp_path / "shop")
    assert (status, err.count("\n")) == (2, 1)
    assert "names several. Give one, or --tenants" in err
    short = ["--epochs", 1, "--batch-size", 4, "--output", tmp_path / "ben"]
    status, _, err = command("tune", *FEW, *two, "--data", tenants / "ben.jsonl", *short)
    assert status == 0, err
    card = (tmp_path / "ben" / "adapter" / "README.md").read_text()
    assert re.search(r"8 rows of pocket-math and pocket-sentiment, \d+ tokens", card)
    short[-1] = tmp_path / "many"
    status, _, err = command("tune-many", *FEW, *two, "--tenants", tenants, *short)
    assert status == 0, err
    bases = [
        [
            X
            for layer in frozen_core_layers(adapter_in(folder), "default").values()
            for X in layer.factors("default")[:2]
        ]
        for folder in (tmp_path / "ben", tmp_path / "many" / "ben")
    ]
    assert all(torch.equal(X, Y) for X, Y in zip(*bases, strict=True))


def only_anna(folder: Path) -> None:
    (folder / "ben.jsonl").unlink()


def ben_has_a_row(folder: Path) -> None:
    (folder / "ben.jsonl").write_text(json.dumps({"prompt": "How many?", "completion": " 3"}) + "\n")


def ben_has_two_rows(folder: Path) -> None:
    (folder / "ben.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "completion": " 3"}) + "\n" for i in (1, 2))
    )


def ben_says_nothing(folder: Path) -> None:
    (folder / "ben.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "completion": ""}) + "\n" for i in range(9))
    )


def leave(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (only_anna, [], "chosen for two at least, but .* holds only 'anna'. Give its file as --data"),
        (ben_has_a_row, [], "Tenant 'ben'.*needs rows to train on"),
        (ben_has_two_rows, [], "2 rows at least, but 'ben' has 1"),
        (leave, ["--calibration-size", 1], "2 rows at least, but 'anna' has 1"),
        (ben_says_nothing, [], "Tenant 'ben'"),
        (leave, ["--method", "eva"], "'eva' here reads others. Use fcca"),
        (leave, ["--method", "random"], "'random' reads no calibration data. Use fcca"),
        (leave, ["--data", "x.jsonl"], "--tenants and --data name the same thing. Leave one out"),
        (leave, ["--task", "sst2"], "give one"),
        (leave, ["--calibration-task", "sst2"], "leave --calibration-task out"),
    ],
)
def test_what_is_no_group_of_tenants_is_one_line_and_writes_nothing(
    change: Callable[[Path], None], words: list[str], message: str, command: Command, tenants: Path, tmp_path: Path
) -> None:
    change(tenants)
    status, _, err = command("calibrate", *FEW, *words, "--tenants", tenants, "--output", tmp_path / "shop")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(message, err), err
    assert not (tmp_path / "shop").exists()


def test_a_basis_grows_for_a_newcomer_and_serves_it_beside_the_others(
    command: Command, tenants: Path, tmp_path: Path
) -> None:
    short, newcomer = [*FEW[:2], "--epochs", 1, "--batch-size", 4], tmp_path / "cleo.jsonl"
    (tenants / "ben.jsonl").rename(newcomer)
    assert command("calibrate", *FEW, "--data", tenants / "anna.jsonl", "--output", tmp_path / "shop")[0] == 0
    old = ["--basis", tmp_path / "shop" / "basis"]
    assert command("tune", *short, "--data", tenants / "anna.jsonl", *old, "--output", tmp_path / "anna")[0] == 0
    grow = ["calibrate", *FEW[:2], "--calibration-size", 4, "--grow", tmp_path / "shop" / "basis"]
    status, out, err = command(*grow, "--data", newcomer, "--by", 2, "--output", tmp_path / "wide")
    assert status == 0, err
    assert "How well the basis fits 1 tenant" in out
    wide = load_basis(tmp_path / "wide" / "basis")
    assert {P.shape[1] for P, _ in wide.layers.values()} == {6}
    assert [one.identity for one in wide.older] == [load_basis(tmp_path / "shop" / "basis").identity]
    assert re.search(r"; 2 more for 1 group of 4 rows each, \d+ tokens$", str(wide.calibrated_on))
    status, _, err = command(*grow, "--tenants", tenants, "--by", 1, "--output", tmp_path / "more")
    assert status == 0, err
    on_wide = ["--basis", tmp_path / "wide" / "basis", "--output", tmp_path / "cleo"]
    assert command("tune", *short, "--data", newcomer, *on_wide)[0] == 0
    bank = CoreBank(adapter_in(tmp_path / "cleo"), capacity=2)
    for name in ("anna", "cleo"):
        bank.put(name, tmp_path / name / "adapter")
    for words, message in (
        (["--by", 0], "grows by one direction at least, but by=0"),
        (["--by", 999], r"at most min\(m, n\) directions"),
        (["--method", "eva", "--by", 1], "has method fcca, but eva came"),
    ):
        status, _, err = command(*grow, "--data", newcomer, *words, "--output", tmp_path / "no")
        assert (status, err.count("\n")) == (2, 1)
        assert re.search(message, err), err
        assert not (tmp_path / "no").exists()


def test_what_a_calibration_warns_of_is_a_line_on_the_screen(command: Command, tmp_path: Path) -> None:
    rows = [{"prompt": f"How many is {a} and 3?", "completion": f" {a + 3}"} for a in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--model", pocket_model_path(), "--rank", 16, "--calibration-size", 3]
    status, out, err = command("calibrate", *named, "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    assert re.search(r"Warning: \d+ of 16 layers have fewer independent directions", " ".join(out.split()))
