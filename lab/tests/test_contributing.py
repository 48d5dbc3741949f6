"""CONTRIBUTING's table, "what to touch": what it names is there, and each table holds all that is in its room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_args

import pytest

from frozencore import constructors
from frozencore.constructors import CONSTRUCTORS, Constructor
from frozencore.tune import methods, tasks
from frozencore.tune.methods import METHODS, Method
from frozencore.tune.suite import TASKS
from frozencore.tune.tasks import Task
from frozencore_lab.campaign import kinds
from frozencore_lab.campaign.kinds import KINDS, StudyKind
from frozencore_lab.campaign.spec import Figure
from frozencore_lab.reports.figures import DRAWN
from places import LAB, ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## What to touch")[1].split("\n\n")[1]
ROOMS = (ROOT / "src" / "frozencore", LAB / "src")


def rows() -> dict[str, str]:
    """The files of each thing that can be added."""
    lines = [line.strip("| ").split(" | ", 1) for line in TABLE.splitlines()[2:]]
    return {thing.split(",")[0]: files for thing, files in lines}


def modules_of(package: Any) -> Iterator[Any]:
    for found in iter_modules(package.__path__, f"{package.__name__}."):
        yield import_module(found.name)


def classes_of(module: Any, base: type) -> set[type]:
    """The classes that a module defines and from which an object can be made."""
    own = (value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)
    return {kind for kind in own if issubclass(kind, base) and not isabstract(kind)}


@pytest.mark.parametrize("thing", rows())
def test_every_file_that_the_table_names_is_there(thing: str) -> None:
    names = re.findall(r"`([\w/]+\.py)`", rows()[thing])
    assert names
    for name in names:
        beside = [Path(other).parent for other in names if "/" in other]
        places = [room / folder / name for room in ROOMS for folder in (Path(), *beside)]
        assert any(list(place.parent.glob(place.name.replace("NAME", "*"))) for place in places), name


@pytest.mark.parametrize(
    ("table", "base", "modules"),
    [
        pytest.param(CONSTRUCTORS, Constructor, list(modules_of(constructors)), id="constructors"),
        pytest.param(METHODS, Method, list(modules_of(methods)), id="methods"),
        pytest.param(KINDS, StudyKind, [kinds], id="kinds"),
    ],
)
def test_every_class_that_can_be_chosen_has_a_row(table: dict[str, Any], base: type, modules: list[Any]) -> None:
    found = {kind for module in modules for kind in classes_of(module, base)}
    assert {kind for kind in found if not kind.__subclasses__()} <= {type(row) for row in table.values()}


def test_every_task_of_the_room_has_a_row() -> None:
    found = [value for module in modules_of(tasks) for value in vars(module).values() if isinstance(value, Task)]
    assert len(found) > 10
    assert {task.name for task in found} <= TASKS.keys()


def test_every_task_of_the_paper_knows_its_label_and_its_family() -> None:
    assert all((task.label is None) == (task.family is None) for task in TASKS.values())
    assert sum(task.family is not None for task in TASKS.values()) == 11


def test_every_figure_that_a_study_may_ask_for_is_drawn() -> None:
    assert set(get_args(Figure)) <= DRAWN.keys()
