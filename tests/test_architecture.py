"""Rooms stand on at most ten floors without a circle, types have names of their own, and one module forks."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from fixtures import ROOT

SOURCES = (ROOT / "src" / "frozencore", ROOT / "lab" / "src" / "frozencore_lab")
MOST_FLOORS = 11
MOST_LATE_IMPORTS = 20


def room_of(module: str) -> str:
    """The folder of a module; single files of the library are the ground floor, except three."""
    package, *inside = module.split(".")
    if not inside or inside[0] == "public":
        return f"{package}: public names"
    if inside[0] == "__main__":
        return f"{package}.cli"
    source = next(source for source in SOURCES if source.name == package)
    is_room = (source / inside[0]).is_dir() or source != SOURCES[0] or inside[0] == "distributed"
    return f"{package}.{inside[0]}" if is_room else "ground floor"


def imports_of(file: Path) -> Iterator[str]:
    """Every module of ours that a file imports, also inside functions and for type checking alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports relatively"
            yield str(node.module)


def test_rooms_stand_on_at_most_eleven_floors_without_a_circle() -> None:
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


def imports_in_functions(node: ast.AST, *, inside: bool = False) -> Iterator[int]:
    """The lines of imports inside functions, without those for type checking alone."""
    for child in ast.iter_child_nodes(node):
        if inside and isinstance(child, ast.Import | ast.ImportFrom):
            yield child.lineno
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imports_in_functions(
                child, inside=inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            )


def test_at_most_twenty_imports_stand_inside_functions() -> None:
    """They are for fast starts and optional packages: one between a verb's checks and its work, one a package."""
    lines = {file: [*imports_in_functions(ast.parse(file.read_text()))] for file in (ROOT / "src").rglob("*.py")}
    assert sum(map(len, lines.values())) <= MOST_LATE_IMPORTS, {file: at for file, at in lines.items() if at}


def types_in(file: Path) -> Iterator[str]:
    """The classes and the named types at the top of a file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name) and re.match("[A-Z][a-z]", t.id))


def test_no_two_types_bear_one_name() -> None:
    places = defaultdict(list)
    for file in (file for source in SOURCES for file in sorted(source.rglob("*.py"))):
        for name in types_in(file):
            places[name].append(str(file.relative_to(ROOT)))
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_only_the_module_of_the_fork_server_forks() -> None:
    """A process that has computed and is forked may hang in a lock of MKL, once in thousands of times."""
    ways = {"os.fork(", 'get_context("fork")', "set_start_method", "multiprocessing.Process("}
    root = SOURCES[0].parents[1]
    files = [file for folder in ("src", "lab", "tests", "benchmarks") for file in (root / folder).rglob("*.py")]
    forking = {file.name for file in files for way in ways if way in file.read_text(encoding="utf-8")}
    assert forking <= {"forked.py", "test_architecture.py"}


def test_the_flow_of_a_row_names_at_most_twelve_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    flow = page.partition("## One row, from a file to vLLM")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `(\S+\.py)`", flow, flags=re.MULTILINE)
    assert 10 <= len(files) <= 12
    assert [file for file in files if not (ROOT / "src" / file).is_file()] == []
