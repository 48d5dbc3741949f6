"""The page on the architecture names every room, and files that are there; rooms stand on at most nine floors."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
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


SOURCES = (ROOT / "src" / "frozencore", ROOT / "lab" / "src" / "frozencore_lab")
MOST_FLOORS = 9


def room_of(module: str) -> str:
    """The folder of a module. Single files are the ground floor, except the public names and the command's start."""
    package, *inside = module.split(".")
    if not inside or inside[0] == "public":
        return f"{package}: public names"
    if inside[0] == "__main__":
        return f"{package}.cli"
    source = next(source for source in SOURCES if source.name == package)
    return f"{package}.{inside[0]}" if (source / inside[0]).is_dir() else "ground floor"


def imports_of(file: Path) -> Iterator[str]:
    """Every module of ours that a file imports, also inside functions and for type checking alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports relatively"
            yield str(node.module)


def test_rooms_stand_on_at_most_nine_floors_without_a_circle() -> None:
    below: dict[str, set[str]] = defaultdict(set)
    for source in SOURCES:
        for file in source.rglob("*.py"):
            own = room_of(".".join(file.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__"))
            rooms = {
                room_of(module) for module in imports_of(file) if module.split(".")[0] in {s.name for s in SOURCES}
            }
            below[own] |= rooms - {own}
    assert len(below) > 10
    floor: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():  # raises CycleError
        floor[room] = 1 + max((floor[under] for under in below[room]), default=0)
    assert max(floor.values()) <= MOST_FLOORS, sorted(floor.items(), key=lambda item: item[1])


def test_every_room_is_named_by_itself_or_with_the_room_that_it_is_in() -> None:
    named = {folder_of(room): holds for room, holds, _ in ROWS}
    rooms = [file.parent for source in SOURCES for file in source.rglob("__init__.py") if file.parent not in SOURCES]
    assert len(rooms) > 20
    for room in rooms:
        assert room in named or f"`{room.name}`" in named.get(room.parent, ""), room


@pytest.mark.parametrize(("room", "holds", "first"), ROWS)
def test_the_first_file_of_a_room_is_there(room: str, holds: str, first: str) -> None:
    assert holds
    assert (folder_of(room) / first).is_file()


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"])
def test_every_file_of_ours_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(
        r"(?<![\w/])(?:src|lab|tests|benchmarks|docs)/[\w./-]+\.(?:py|md|json|yaml)\b", page.read_text("utf-8")
    )
    assert not [name for name in named if not (ROOT / name).exists() and not (ROOT / "lab" / name).exists()]
