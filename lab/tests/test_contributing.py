"""CONTRIBUTING's table, "what to touch": what it names is there, and each table holds all that is in its room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from places import LAB, ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## What to touch")[1].split("\n\n")[1]
ROOMS = (ROOT / "src" / "frozencore", LAB / "src")


def rows() -> dict[str, str]:
    """The files of each thing that can be added."""
    lines = [line.strip("| ").split(" | ", 1) for line in TABLE.splitlines()[2:]]
    return {thing.split(",")[0]: files for thing, files in lines}


@pytest.mark.parametrize("thing", rows())
def test_every_file_that_the_table_names_is_there(thing: str) -> None:
    names = re.findall(r"`([\w/]+\.py)`", rows()[thing])
    assert names
    for name in names:
        beside = [Path(other).parent for other in names if "/" in other]
        places = [room / folder / name for room in ROOMS for folder in (Path(), *beside)]
        assert any(list(place.parent.glob(place.name.replace("NAME", "*"))) for place in places), name


@pytest.mark.parametrize("thing", rows())
def test_every_name_that_the_table_says_is_in_a_file_that_it_names(thing: str) -> None:
    files = [
        found
        for name in re.findall(r"`([\w/]+\.py)`", rows()[thing])
        for room in ROOMS
        for found in room.glob(f"**/{name}")
    ]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    names = re.findall(r"`((?!NAME)[A-Z_][A-Za-z_]+|[a-z]+_[a-z_]+)`", rows()[thing])
    assert not [name for name in names if name not in code]
