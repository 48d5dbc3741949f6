"""The page on the architecture names every room, and files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from places import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| `(?P<room>(?:lab: )?[\w/]+)` \| (?P<holds>.*) \| `(?P<first>[\w.]+)` \|$", PAGE, flags=re.MULTILINE
)


def folder_of(room: str) -> Path:
    if room.startswith("lab: "):
        return ROOT / "lab" / "src" / "frozencore_lab" / room.removeprefix("lab: ")
    return ROOT / "src" / "frozencore" / room


def test_every_room_is_named_by_itself_or_with_the_room_that_it_is_in() -> None:
    named = {folder_of(room): holds for room, holds, _ in ROWS}
    sources = (ROOT / "src" / "frozencore", ROOT / "lab" / "src" / "frozencore_lab")
    rooms = [file.parent for source in sources for file in source.rglob("__init__.py") if file.parent not in sources]
    assert len(rooms) > 20
    for room in rooms:
        assert room in named or f"`{room.name}`" in named.get(room.parent, ""), room


@pytest.mark.parametrize(("room", "holds", "first"), ROWS)
def test_the_first_file_of_a_room_is_there(room: str, holds: str, first: str) -> None:
    assert holds
    assert (folder_of(room) / first).is_file()
