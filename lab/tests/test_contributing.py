"""CONTRIBUTING's table, "what to touch", against the files, and what a failed CI run says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fixtures import LAB, ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## What to touch")[1].split("\n\n")[1]
ROOMS = (ROOT / "src" / "frozencore", LAB / "src")


def rows() -> dict[str, str]:
    """The files of each thing that can be added."""
    lines = [line.strip("| ").split(" | ", 1) for line in TABLE.splitlines()[2:]]
    return {thing.split(",")[0]: files for thing, files in lines}


def files(thing: str) -> dict[str, list[Path]]:
    """The files that the table names for a thing, by name; one without a folder may be beside another."""
    names = re.findall(r"`([\w/]+\.py)`", rows()[thing])
    beside = [Path(), *(Path(name).parent for name in names if "/" in name)]
    return {
        name: [
            file for room in ROOMS for folder in beside for file in room.glob(str(folder / name.replace("NAME", "*")))
        ]
        for name in names
    }


@pytest.mark.parametrize("thing", rows())
def test_every_file_that_the_table_names_is_there(thing: str) -> None:
    found = files(thing)
    assert found
    assert not [name for name, places in found.items() if not places]


@pytest.mark.parametrize("thing", rows())
def test_every_name_that_the_table_says_is_in_a_file_that_it_names(thing: str) -> None:
    code = "".join(file.read_text(encoding="utf-8") for places in files(thing).values() for file in places)
    names = re.findall(r"`((?!NAME)[A-Z_][A-Za-z_]+|[a-z]+_[a-z_]+)`", rows()[thing])
    assert not [name for name in names if name not in code]


def test_a_failed_ci_run_names_the_processor_and_its_instructions(tmp_path: Path) -> None:
    (tmp_path / "make").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "make").chmod(0o755)
    with_make = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=with_make, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(r"Model name: +\w.*\n(Flags|Features): +\w", done.stdout)
