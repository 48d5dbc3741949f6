"""Records are written whole or not at all, and say where they come from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from frozencore.errors import ArtifactError
from frozencore.lab.run.provenance import provenance, source_commit
from frozencore.whole_file import require_writable, write_json, write_lines


def test_nan_and_infinity_become_null_and_paths_text(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": [float("inf"), 1.5], "z": Path("p"), 3: (True, None)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [None, 1.5], "z": "p", "3": [True, None]}


def test_a_failed_write_leaves_the_earlier_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"kept": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"kept": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_json(tmp_path / "file" / "a.json", {})
    with pytest.raises(ArtifactError, match=r"--output .*below cannot be written: .*file is not a writable folder"):
        require_writable(tmp_path / "file" / "below")
    require_writable(tmp_path / "new" / "newer")
    assert not (tmp_path / "new").exists()


def test_lines_are_one_object_each(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"a": 1}, {"b": "ü\n"}])
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [{"a": 1}, {"b": "ü\n"}]


def test_provenance_names_versions_machine_and_commit() -> None:
    source = provenance()
    assert source["versions"]["torch"]
    assert source["num_threads"] >= 1
    commit = source_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
