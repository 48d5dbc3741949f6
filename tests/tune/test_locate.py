"""Which files of a folder are tenants, and what a tenant can be called."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from unicodedata import normalize

import pytest

from frozencore.errors import ConfigError
from frozencore.tune.locate import find_tenants

Command = Callable[..., tuple[int, str, str]]


def test_every_file_of_a_folder_is_a_tenant_or_is_named(tmp_path: Path, command: Command) -> None:
    rows = "".join(json.dumps({"prompt": f"What is {i} and 1?", "completion": str(i + 1)}) + "\n" for i in range(9))
    for name in ("anna.jsonl", "BEN.JSONL", "dora.ndjson", "notes.txt", "eve.jsonl.bak", "._anna.jsonl", ".DS_Store"):
        (tmp_path / name).write_text(rows)
    (tmp_path / "cara.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "old").mkdir()
    assert list(find_tenants(tmp_path)) == ["BEN", "anna", "cara", "dora"]
    status, out, _ = command("tune-many", "--model", "pocket", "--tenants", tmp_path, "--dry-run")
    assert status == 0
    assert "4 tenants on a basis" in out
    assert f"not read: eve.jsonl.bak, notes.txt, old (3 in {tmp_path})" in " ".join(out.split())


NAMES = ["मीरा", "สมศรี", "கவிதா", "שָׁלוֹם", "José", "ශ්\u200dරී", "علی\u200cرضا", "a" * 100]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_every_script_are_those_of_tenants_in_one_form(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{normalize('NFD', name)}.jsonl").touch()
    assert list(find_tenants(tmp_path)) == [normalize("NFC", name)]


def test_a_folder_is_a_folder_whatever_its_name_ends_with(tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").mkdir()
    (tmp_path / "rows.yaml" / "anna.jsonl").touch()
    assert list(find_tenants(tmp_path / "rows.yaml")) == ["anna"]


@pytest.mark.parametrize("name", ["\u0301a", "a b", "-a", "anna\u200d", "a\u200bb", "a\u202eb", "அ" * 80, "Jos\udce9"])
def test_a_name_that_is_no_word_or_too_long_for_a_disk_is_none_of_a_tenant(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.jsonl").touch()
    with pytest.raises(ConfigError, match=r"^A tenant's name becomes a folder's: .* Rename [^\ud800-\udfff]*.jsonl\.$"):
        find_tenants(tmp_path)


@pytest.mark.parametrize("names", [("ben.train", "ben.eval"), ("a_train", "a_test"), ("x-valid", "x-Train", "anna")])
def test_a_file_to_score_is_no_tenant(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").touch()
    with pytest.raises(ConfigError, match=r"is trained, but .*jsonl and .*jsonl look like parts of one data set"):
        find_tenants(tmp_path)
    listed = tmp_path / "tenants.yaml"
    listed.write_text("".join(f"{name}: {name}.jsonl\n" for name in names))
    assert [*find_tenants(listed)] == [*names]


def test_parts_of_different_data_sets_are_tenants(tmp_path: Path) -> None:
    names = ["anna", "ben.train", "cara_test", "contest", "dev"]
    for name in names:
        (tmp_path / f"{name}.jsonl").touch()
    assert [*find_tenants(tmp_path)] == names
